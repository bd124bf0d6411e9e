"""Configurations that the demo compares: full cache, budget alone, budget with repair, the default."""

from dataclasses import dataclass, replace

from kvrecall.client import ResearchOptions, Session, SessionOptions

FULL = "full cache"
ALONE = "budget alone"
IN_PAUSES = "repair in pauses"
IN_TURNS = "repair in pauses and turns"
DEFAULT = "the default"

PAUSES = ("tool_call", "tool_result")
PAUSES_AND_TURNS = (*PAUSES, "turn")


@dataclass(frozen=True)
class DemoConfig:
    """Settings of a session of the demo; `budget` and `repair_rows` are rows.

    None is left to the service. `resolve` fills it in.
    """

    name: str
    method: str | None
    budget: int
    repair_rows: int | None = 0
    repair_on: tuple[str, ...] | None = ()

    @property
    def has_budget(self) -> bool:
        """True if the method evicts rows."""
        return self.method != "full"

    @property
    def options(self) -> SessionOptions:
        """What is sent to create a session."""
        research = ResearchOptions()
        if self.method is not None:
            research["method"] = self.method
        if self.repair_rows is not None:
            research["repair_rows"] = self.repair_rows
        if self.repair_on is not None:
            research["repair_on"] = self.repair_on
        options = SessionOptions(budget=self.budget)
        if research:
            options["research"] = research
        return options

    def resolve(self, session: Session) -> "DemoConfig":
        """The configuration with what the service chose for a session of it."""
        return replace(
            self,
            method=session.research.method,
            repair_rows=session.research.repair_rows,
            repair_on=session.research.repair_on,
        )


def compared_configs(
    method: str, budget: int, repair_rows: int, *, pauses_alone: bool
) -> tuple[DemoConfig, ...]:
    """The configurations to compare; with `pauses_alone` one that repairs in no turn, too.

    `repair_rows` are part of the budget, which is equal in all. The default names the budget alone.
    """
    in_pauses = DemoConfig(IN_PAUSES, method, budget, repair_rows, PAUSES)
    return (
        DemoConfig(FULL, "full", budget),
        DemoConfig(ALONE, method, budget),
        *((in_pauses,) if pauses_alone else ()),
        DemoConfig(IN_TURNS, method, budget, repair_rows, PAUSES_AND_TURNS),
        DemoConfig(DEFAULT, None, budget, None, None),
    )
