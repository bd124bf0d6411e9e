"""Configurations that the demo compares: full cache, budget alone, budget with repair."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoConfig:
    """Settings of a session of the demo; `budget` and `repair_rows` are rows."""

    name: str
    method: str
    budget: int
    repair_rows: int = 0
    repair_on: tuple[str, ...] = ()

    @property
    def has_budget(self) -> bool:
        """True if the method evicts rows."""
        return self.method != "full"


def compared_configs(
    method: str, budget: int, repair_rows: int, *, pauses_alone: bool
) -> tuple[DemoConfig, ...]:
    """The configurations to compare; with `pauses_alone` one that repairs in no turn, too.

    `repair_rows` are part of the budget, which is equal in all.
    """
    pauses = ("tool_call", "tool_result")
    in_pauses = DemoConfig("repair in pauses", method, budget, repair_rows, pauses)
    in_turns = DemoConfig(
        "repair in pauses and turns", method, budget, repair_rows, (*pauses, "turn")
    )
    return (
        DemoConfig("full cache", "full", budget),
        DemoConfig("budget alone", method, budget),
        *((in_pauses,) if pauses_alone else ()),
        in_turns,
    )
