"""Suite fidelity: recorded conversations under every method and budget, beside the full cache.

Each turn is said in a session with the full cache and, at each budget, in one of the method's; what counts is how far
the next-token distributions over the recorded replies lie apart. A session of a method that has episodes builds them as
the service would, at moments that follow from the conversation alone, and matches each turn with the user's words.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evals import episodes, harness
from evals.configs import FULL, Arm, arm_of, rows_of
from evals.errors import BadDataFile
from evals.harness import Message, Session, Setup
from evals.suite import Record, Suite
from evals.summary import grouped, mean_row
from kvrecall.domain.episodes import rebuild_due
from kvrecall.domain.utterances import query_text
from kvrecall.protocol.convert import chat_to_wire, message_from_wire
from kvrecall.replay.formats import read_recordings
from kvrecall.reporting.results import Row
from workers.model.tokenizer import ChatTokenizer

BUDGETS = ("128", "256", "512", "1024")
_TOKENS_AROUND = 24
"""At most so many tokens of the template stand around a message's own."""


@dataclass(frozen=True)
class Replay:
    """The first `tokens` tokens of one recording under one arm, at all budgets. `data` is what its source is called."""

    setup: Setup
    budgets: tuple[str, ...]
    data: str
    path: str
    recording: int
    tokens: int

    @property
    def label(self) -> str:
        """For the progress bar."""
        return f"{self.setup.arm.name}, {self.data} {self.recording + 1}"


def suite(
    setup: Setup,
    arms: Sequence[Arm],
    budgets: Sequence[str],
    sources: Sequence[Path],
    limit: int | None,
    tokens: int,
) -> Suite[Replay]:
    """Every arm on the first `limit` recordings of each source: a file, or a folder of files. Raises BadDataFile."""
    units = [
        Replay(replace(setup, arm=arm), tuple(budgets), source.stem, str(path), number, tokens)
        for source in sources
        for path, number in recordings_of(source)[:limit]
        for arm in arms
        if arm.evicts
    ]
    return Suite(
        "fidelity",
        setup.seed,
        setup.model,
        tuple(units),
        run,
        partial(result_rows, seed=setup.seed),
    )


def recordings_of(source: Path) -> list[tuple[Path, int]]:
    """Every recording as its file and its number in there. Raises BadDataFile, BadReplayFile."""
    files = sorted(source.glob("*.json*")) if source.is_dir() else [source]
    if not files:
        raise BadDataFile(f"{source} has no JSON file in it")
    return [(path, number) for path in files for number in range(len(read_recordings(path)))]


def run(unit: Replay) -> list[Record]:
    """Say the recording, turn by turn, in all sessions. Raises `workers.errors`."""
    setup = unit.setup
    found = harness.loaded(setup.model)
    recording = read_recordings(Path(unit.path))[unit.recording]
    tokens = min(unit.tokens, found.model.max_context)
    turns = turns_within(recording.messages, found.tokenizer, tokens)
    budgets = {budget: rows_of(budget, tokens) for budget in unit.budgets}
    with harness.worker_of(setup, max(tokens, *budgets.values()), slots=1 + len(budgets)) as worker:
        whole = Session(worker, harness.spec_of(replace(setup, arm=arm_of(FULL)), tokens, FULL))
        kept = {
            name: _Kept(unit, Session(worker, harness.spec_of(setup, rows, name)))
            for name, rows in budgets.items()
        }
        records = list[Record]()
        for number, turn in enumerate(turns):
            whole.say(turn, keep_distribution=turn[-1]["role"] == "assistant")
            for budget, each in kept.items():
                records += each.say(turn, budget, number, recording.name)
    return records


@dataclass
class _Kept:
    """A session under a budget, and its episodes."""

    unit: Replay
    session: Session
    built: episodes.Built | None = None
    segments: int = 0

    def say(
        self, turn: Sequence[Message], budget: str, number: int, recording: str
    ) -> Iterator[Record]:
        """Say a turn; a record of how far its reply lies from the full cache's, where it has one."""
        answered = turn[-1]["role"] == "assistant"
        chosen = episodes.matched(self.built, _words_of_user(turn))
        done = self.session.say(
            turn, compare_with=FULL if answered else "", episode=chosen.episode if chosen else None
        )
        self._build_if_due()
        if not answered:
            return
        yield {
            "data": self.unit.data,
            "recording": recording,
            "turn": number,
            "arm": self.unit.setup.arm.name,
            "budget": budget,
            "rows": self.session.spec.budget,
            "length": done.memory.length,
            "active_rows": round(harness.active_rows(self.session), 2),
            "heard": done.fidelity.tokens,
            "kl": done.fidelity.kl_mean,
            "top1": done.fidelity.top1_agreement,
        }

    def _build_if_due(self) -> None:
        setup = self.unit.setup
        if setup.arm.build == "none":
            return
        settings = replace(setup.episodes, build=setup.arm.build)
        segments = len(self.session.utterances) // settings.segment_utterances
        length = self.session.memory.length
        budget = self.session.spec.budget
        if rebuild_due(
            settings, segments=segments, built=self.segments, length=length, budget=budget
        ):
            self.built = episodes.build(self.session, settings)
            self.segments = segments


def _words_of_user(turn: Sequence[Message]) -> str:
    return query_text([message_from_wire(chat_to_wire(dict(message))) for message in turn])


def turns_within(
    messages: Sequence[Message], tokenizer: ChatTokenizer, tokens: int
) -> list[list[Message]]:
    """The conversation as turns that each end in an assistant's message, as many as surely fit into `tokens` tokens."""
    turns: list[list[Message]] = [[]]
    size = 0
    for message in messages:
        calls = str(message.get("tool_calls") or "")
        size += len(tokenizer.encode(f"{message['content']}{calls}")) + _TOKENS_AROUND
        if size > tokens:
            return turns[:-1]
        turns[-1].append(message)
        if message["role"] == "assistant":
            turns.append([])
    return [turn for turn in turns if turn]


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Means over the turns of all recordings of a source, by method and budget."""
    rows: list[Row] = []
    for (data, arm, budget), found in grouped(records, "data", "arm", "budget").items():
        told: Mapping[str, Any] = {
            "method": arm,
            "k": 0,
            "budget": found[0]["rows"],
            "share": budget,
            "active_rows": max(each["active_rows"] for each in found),
            "tokens_heard": sum(each["heard"] for each in found),
        }
        rows += mean_row(f"{data}: mean KL, nats", [each["kl"] for each in found], seed, **told)
        rows += mean_row(f"{data}: top-1 agreement", [each["top1"] for each in found], seed, **told)
    return rows
