"""What repairs observe before a first token, and that they observe nothing without evicted rows."""

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[list[int]]]:
    """Begin to list the blocks of tokens that a worker's repairs and evictions observe."""

    def begin(worker: Any) -> list[list[int]]:
        blocks = list[list[int]]()
        observe = worker.engine.observe

        def listed(resident: Any, token_ids: Any) -> Any:
            blocks.append(list(token_ids))
            return observe(resident, token_ids)

        monkeypatch.setattr(worker.engine, "observe", listed)
        return blocks

    return begin


def test_while_every_row_is_active_no_repair_observes_and_a_turn_reports_none(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    observed: Callable[[Any], list[list[int]]],
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    worker.open(method="snapkv", budget=60, repair_rows=20)
    blocks = observed(worker)
    assert not worker.turn("s", words(12), repair=True, max_tokens=4).HasField("repair")
    assert worker.repair("s", text=words(6, seed=1)).report.candidates == 0
    assert not blocks
    worker.turn("s", words(200), generate=False)
    assert worker.turn("s", words(6, seed=1), repair=True, max_tokens=4).repair.promoted
    assert blocks


@pytest.mark.parametrize("most", [32, 64])
def test_of_a_long_turn_both_ends_are_observed(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    observed: Callable[[Any], list[list[int]]],
    most: int,
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    settings = json.dumps({"turn_tokens": most, "contrast": 0})
    worker.open(method="snapkv", budget=60, repair_rows=20, repair_settings=settings)
    worker.turn("s", words(200), generate=False)
    blocks = observed(worker)
    done = worker.turn("s", words(150, seed=1), repair=True, max_tokens=2)
    prompt = list(done.token_ids[: done.prompt_tokens])
    assert len(prompt) > 150
    assert blocks == [prompt[: most // 2] + prompt[-most // 2 :]]
    assert done.repair.observed_tokens == most
