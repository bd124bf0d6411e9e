"""Failures of one rank alone: the job fails on all of them, and the others' jobs go on."""

from collections.abc import Callable
from pathlib import Path

from tests.workers.parallel.launched import run


def test_what_fails_on_one_rank_fails_as_a_whole(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """The second rank's disk fails, once for a read and once for a flush."""
    alone = run("failure", model_path("llama"), tmp_path)
    ranks = run("failure", model_path("llama"), tmp_path, ranks=2)
    for name in ("unreadable", "unwritable"):
        assert alone[name]["errors"] == []
        assert ranks[name]["errors"] == ["StorageFailed"]
        assert ranks[name]["length"] == alone[name]["length"]
        for turn in range(2):
            others = f"others, turn {turn} of {name}"
            assert ranks[others] == alone[others]
