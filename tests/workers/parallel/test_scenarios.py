"""A worker of two ranks beside one of a single process: the same tokens, rows, promotions, reports and failures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.parallel.launched import run

ALIKE = ("turns", "crowd", "reopen", "remember")
FAILURE = "failure"


@pytest.fixture(scope="module")
def found(
    model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all scenarios found, by name: in one process, and on two ranks."""
    folder = tmp_path_factory.mktemp("scenarios")
    cases = {name: (name, model_path("llama")) for name in (*ALIKE, FAILURE)}
    return run(cases, folder), run(cases, folder, ranks=2)


@pytest.mark.parametrize("scenario", ALIKE)
def test_two_ranks_give_what_one_process_gives(
    scenario: str, found: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """Token for token, and row for row over all heads, whichever sessions run at once."""
    alone, ranks = (dict(each[scenario]) for each in found)
    assert alone.keys() == ranks.keys()
    assert ranks.pop("stored", {}) == pytest.approx(alone.pop("stored", {}), rel=0.02)
    assert alone.pop("sizes") > ranks.pop("sizes")
    for name, expected in alone.items():
        assert ranks[name] == expected, name


def test_what_fails_on_one_rank_fails_as_a_whole(
    found: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """The second rank's disk fails, once for a read and once for a flush. The others' turns go on."""
    alone, ranks = (each[FAILURE] for each in found)
    for name in ("unreadable", "unwritable"):
        assert alone[name]["errors"] == []
        assert ranks[name]["errors"] == ["StorageFailed"]
        assert ranks[name]["length"] == alone[name]["length"]
        for turn in range(2):
            others = f"others, turn {turn} of {name}"
            assert ranks[others] == alone[others]
