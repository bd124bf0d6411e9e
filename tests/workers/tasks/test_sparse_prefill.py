"""Sessions with a sparse prefill: the same rows whenever they are computed, and what is reported."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.domain.page_ids import is_random, split_ids
from tests.workers.tasks.turn_log import logged, rebuild
from workers.errors import BadSettings

ON = {"sparse": "on", "alpha": 0.9, "sample": 16, "band": 16, "slash_width": 16, "max_density": 1}
BLOCK = 128


def prefill(**changes: Any) -> dict[str, Any]:
    """The spec's field with the settings of a sparse prefill."""
    return {"options": json.dumps({"prefill": {**ON, **changes}}), "seed": 7}


def stored_rows(worker: Any, name: str, length: int) -> torch.Tensor:
    rows: torch.Tensor = worker.engine.store.gather(name, torch.arange(length))
    return rows


def test_a_turn_reports_its_sparse_blocks(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("reference", block_tokens=BLOCK)
    worker.open(**prefill())
    worker.open("exact")
    done = worker.turn("s", words(300))
    blocks = done.prompt_tokens // BLOCK
    assert done.prefill.blocks in (blocks, blocks + 1), "a short last block is exact"
    assert 0.9 <= done.prefill.cover_min <= done.prefill.cover_mean <= 1
    assert 0 < done.prefill.density < 1
    for name, mean in (("density", done.prefill.density), ("cover", done.prefill.cover_mean)):
        assert worker.metric(f"kvrecall_worker_prefill_{name}_count") == done.prefill.blocks
        total = worker.metric(f"kvrecall_worker_prefill_{name}_sum")
        assert total / done.prefill.blocks == pytest.approx(mean)
    later = worker.turn("s", "and then")
    assert not later.HasField("prefill"), "neither a short turn nor decoding is sparse"
    exact = worker.turn("exact", words(300))
    assert not exact.HasField("prefill")
    assert not torch.equal(stored_rows(worker, "s", 250), stored_rows(worker, "exact", 250))
    worker.check()


def test_auto_leaves_layers_with_few_rows_exact(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("reference", block_tokens=BLOCK)
    worker.open(**prefill(sparse="auto", min_rows=256))
    worker.open("exact")
    done = worker.turn("s", words(400))
    worker.turn("exact", words(400))
    whole = done.prompt_tokens // BLOCK
    assert 1 <= done.prefill.blocks < whole
    ours, exact = (stored_rows(worker, name, 384) for name in ("s", "exact"))
    assert torch.equal(ours[..., :BLOCK, :], exact[..., :BLOCK, :])


@pytest.mark.parametrize("method", ["full", "snapkv", "kvzip", "adakv", "keydiff"])
def test_a_session_that_is_computed_again_has_the_same_bytes(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
    method: str,
) -> None:
    worker = make_worker("reference", block_tokens=BLOCK)
    spec = {"method": method, "budget": 200 if method != "full" else 1024, **prefill()}
    texts = [words(220, seed=seed) for seed in range(2)]
    for name in ("s", "twin"):
        worker.open(name, **spec)
    turns = [worker.turn("s", text, max_tokens=1) for text in texts]
    twins = [worker.turn("twin", text, max_tokens=1) for text in texts]
    assert all(done.prefill.blocks for done in turns)
    assert [done.prefill for done in turns] == [done.prefill for done in twins]
    length = turns[-1].state.length
    before = stored_rows(worker, "s", length)
    assert torch.equal(before, stored_rows(worker, "twin", length))
    lose_page(worker.engine.store, "s", 4)
    log = [logged(*turn) for turn in zip(turns, texts, strict=True)]
    assert rebuild(worker, turns[-1].state, log, epoch=2, **spec).pages == 1
    assert torch.equal(stored_rows(worker, "s", length), before)
    worker.check()


def test_another_seed_draws_other_queries(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("reference", block_tokens=BLOCK)
    for name, seed in (("a", 1), ("b", 2)):
        worker.open(name, **(prefill() | {"seed": seed}))
    reports = [worker.turn(name, words(300)).prefill for name in ("a", "b")]
    assert reports[0].cover_mean != reports[1].cover_mean


def test_rows_of_sparse_blocks_are_no_other_session_s(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("reference", block_tokens=BLOCK)
    states = []
    for name in ("one", "other"):
        worker.open(name, **prefill())
        states.append(worker.turn(name, words(150), generate=False).state)
    ids = [split_ids(state.page_ids) for state in states]
    assert len(ids[0]) >= 2
    assert all(map(is_random, (*ids[0], *ids[1])))
    worker.check()


@pytest.mark.parametrize("method", ["h2o", "scissorhands"])
def test_methods_that_sum_every_query_refuse_it(
    make_worker: Callable[..., Any], method: str
) -> None:
    worker = make_worker()
    with pytest.raises(BadSettings, match=rf"prefill\.sparse 'on'.* {method}"):
        worker.open(method=method, **prefill())
    worker.open(method=method, **prefill(sparse="off"))


def test_a_setting_that_is_not_valid_is_named(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    for changes, named in (({"alpha": 0.2}, "prefill.alpha"), ({"bad": 1}, "prefill.bad")):
        with pytest.raises(BadSettings, match=named):
            worker.open(**prefill(**changes))


def test_a_repairs_observation_is_exact(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("reference", block_tokens=BLOCK)
    worker.open(method="snapkv", budget=160, repair_rows=32, **prefill())
    worker.turn("s", words(300))
    measured = worker.metric("kvrecall_worker_prefill_density_count")
    worker.repair("s", words(200, seed=3))
    assert worker.metric("kvrecall_worker_prefill_density_count") == measured > 0
    worker.check()
