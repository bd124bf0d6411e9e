"""What all ranks of a group have found."""

from collections.abc import Sequence

from workers.parallel.group import Group


def find_common(group: Group, found: Sequence[int]) -> list[int]:
    """Find the numbers that are found on every rank, in this rank's order."""
    common = set(found).intersection(*group.gather(list(found)))
    return [each for each in found if each in common]
