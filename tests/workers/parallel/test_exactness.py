"""A worker of two ranks beside one of a single process: the same tokens, rows, promotions and reports."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers.parallel.launched import run


@pytest.mark.parametrize("scenario", ["turns", "crowd", "reopen", "remember"])
def test_two_ranks_give_what_one_process_gives(
    scenario: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Token for token, and row for row over all heads, whichever sessions run at once."""
    alone = run(scenario, model_path("llama"), tmp_path)
    ranks = run(scenario, model_path("llama"), tmp_path, ranks=2)
    assert alone.keys() == ranks.keys()
    assert ranks.pop("stored", {}) == pytest.approx(alone.pop("stored", {}), rel=0.02)
    assert alone.pop("sizes") > ranks.pop("sizes")
    for name, found in alone.items():
        assert ranks[name] == found, name
