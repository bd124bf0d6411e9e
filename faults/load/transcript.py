"""The acknowledged part of a script."""

from dataclasses import dataclass, field

from faults.load.scripts import Json, Script, Step


@dataclass
class Transcript:
    """Session ids, and answers by number of their step.

    `voided`: an aborted turn was committed before its end, so that later answers differ.
    """

    script: Script
    name: str
    sessions: dict[int, str] = field(default_factory=dict)
    answers: list[Json] = field(default_factory=list)
    voided: bool = False

    def turns(self, session: int) -> list[tuple[Step, Json]]:
        """Acknowledged turns of a session with their answers, those before its fork included."""
        return [(step, answer) for step, answer, _ in self.turns_with_results(session)]

    def turns_with_results(self, session: int) -> list[tuple[Step, Json, list[str]]]:
        """As `turns`, each with the tool results that were reported since the turn before."""
        found: list[tuple[Step, Json, list[str]]] = []
        results: list[str] = []
        for step, answer in zip(self.script.steps, self.answers, strict=False):
            if step.kind == "fork" and step.body["as"] == session:
                found = self.turns_with_results(step.session)[: step.body["turns"]]
            elif step.session != session:
                continue
            elif step.kind == "event" and "result" in step.body and _is_final(step):
                results.append(step.body["result"])
            elif step.kind == "turn":
                found.append((step, answer, results))
                results = []
        return found

    def aborted(self, session: int) -> list[str]:
        """Texts of the aborted turns of a session and of its parents."""
        steps = self.script.steps[: len(self.answers) + 1]
        parents = [
            step.session for step in steps if step.kind == "fork" and step.body["as"] == session
        ]
        own = [
            step.body["messages"][-1]["content"]
            for step in steps
            if step.kind == "abort" and step.session == session
        ]
        return [*own, *(text for parent in parents for text in self.aborted(parent))]


def _is_final(step: Step) -> bool:
    return step.body["event_type"] in ("tool_call.completed", "tool_call.failed")
