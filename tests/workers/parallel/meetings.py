"""Program of one of several ranks that meet: what each exchange gave, as JSON.

usage: meetings.py, with the variables of torch's launcher.
"""

import json
from collections.abc import Callable
from typing import Any

from workers.parallel.failures import GroupLost, PeerFailed
from workers.parallel.process_group import ProcessGroup


def gather_values(group: ProcessGroup) -> list[Any]:
    """Short values of all, then a long one of the last rank alone."""
    long = "x" * 5000 * (group.index == group.count - 1)
    return [group.gather(group.index), group.gather(long), group.lead(group.index)]


def fail_in_one_step(group: ProcessGroup) -> list[Any]:
    """Three steps of a batch, in each of which all meet twice; the last rank fails in the second."""
    found, errors = list[Any](), list[Exception | None]()
    for step in "abc":
        group.next_step()
        failed: Exception | None = None
        try:
            found.append(group.gather(f"{step}{group.index}"))
            if step == "b" and group.index == group.count - 1:
                raise OSError("no disk")
            found.append(group.some([group.index == 0]))
        except (PeerFailed, OSError) as error:
            found.append(type(error).__name__)
            failed = error
        errors.append(failed)
    ends = group.end(errors)
    return [found, [str(each or "") for each in ends], group.lead("goes on")]


def fail_alike(group: ProcessGroup) -> list[Any]:
    """A step that fails on all, by errors of which one cannot be sent."""

    class Local(Exception):
        pass

    [error] = group.end([Local("here") if group.index else ValueError("there")])
    return [type(error).__name__, str(error)]


def part_ways(group: ProcessGroup) -> list[Any]:
    """Ranks at different exchanges of one step."""
    try:
        group.gather(1) if group.index else group.lead(1)
    except GroupLost as error:
        return [str(error)]
    return []


def count_local(group: ProcessGroup) -> list[Any]:
    """Ranks of this machine."""
    return [group.local]


SCENARIOS: dict[str, Callable[[ProcessGroup], list[Any]]] = {
    "values": gather_values,
    "one step": fail_in_one_step,
    "alike": fail_alike,
    "local": count_local,
    "apart": part_ways,
}

if __name__ == "__main__":
    joined = ProcessGroup.join("cpu", 60.0)
    print(json.dumps({name: scenario(joined) for name, scenario in SCENARIOS.items()}), flush=True)
    joined.leave()
