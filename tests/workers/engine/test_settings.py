"""An operator's settings are checked where they are made."""

from typing import Any

import pytest
from pydantic import ValidationError

from workers.engine.settings import WorkerSettings


def test_the_least_budget_leaves_a_row_to_select() -> None:
    assert WorkerSettings(sinks=3, recent=5).min_budget == 9


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"block_tokens": 0},
        {"turn_share": 1.5},
        {"max_jobs": 0},
        {"sink": 4},
        {"recent": -1},
    ],
)
def test_settings_out_of_range_or_unknown_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        WorkerSettings(**wrong)
