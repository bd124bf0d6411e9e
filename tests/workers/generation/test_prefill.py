"""Prefill appends block by block, and keeps the distribution on recorded text."""

from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch

from tests.workers.drive import drive
from workers.engine.session import WorkerSession
from workers.generation.prefill import prefill
from workers.model.tokenizer import Segment


def _record_length(lengths: list[int], session: WorkerSession) -> None:
    lengths.append(session.length)


def test_blocks_are_as_long_as_set_and_others_may_run_between_them(
    make_worker: Callable[..., Any],
) -> None:
    worker = make_worker(block_tokens=16)
    worker.open()
    engine = worker.engine
    resident = engine.swap_in(engine.session("s"))
    session = resident.session
    session.pending = [7, 1]
    steps = list(
        prefill(
            engine,
            resident,
            [Segment(tuple(range(5, 43)), False)],
            keep_distribution=False,
            on_prompt_end=lambda: None,
        )
    )
    assert steps == [None] * 3
    assert engine.passes == [(1, 16), (1, 16), (1, 8)]
    assert session.length == 40
    assert session.pending == []


def test_the_distribution_covers_every_recorded_token_across_blocks(
    make_worker: Callable[..., Any], plain: Callable[..., Any]
) -> None:
    token_ids = torch.randint(2, 1270, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    segments = [
        Segment(tuple(token_ids[:9]), False),
        Segment(tuple(token_ids[9:31]), True),
        Segment(tuple(token_ids[31:44]), False),
        Segment(tuple(token_ids[44:]), True),
    ]
    recorded = [*range(9, 31), *range(44, 50)]
    with torch.inference_mode():
        logits = plain("llama")(torch.tensor([token_ids])).logits[0]
    for block_tokens in (1, 10, 64):
        worker = make_worker(block_tokens=block_tokens)
        worker.open()
        engine = worker.engine
        resident = engine.swap_in(engine.session("s"))
        prompt_ends: list[int] = []
        running = prefill(
            engine,
            resident,
            segments,
            keep_distribution=True,
            on_prompt_end=partial(_record_length, prompt_ends, resident.session),
        )
        prefilled, _ = drive(running)
        assert prefilled.distribution is not None
        assert torch.allclose(prefilled.logits, logits[-1], atol=1e-3)
        assert prompt_ends == [min(50, -(-9 // block_tokens) * block_tokens)], (
            "with the block of the ninth token"
        )
        assert prefilled.distribution.token_ids == tuple(token_ids[i] for i in recorded)
        expected = logits.log_softmax(-1)[[i - 1 for i in recorded]]
        assert torch.allclose(prefilled.distribution.log_probs, expected, atol=1e-3)


def test_nothing_recorded_gives_no_distribution(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    worker.open()
    running = prefill(
        worker.engine,
        worker.engine.swap_in(worker.engine.session("s")),
        [Segment((4, 5, 6), False)],
        keep_distribution=True,
        on_prompt_end=lambda: None,
    )
    next(running)
    with pytest.raises(StopIteration) as finished:
        next(running)
    assert finished.value.value.distribution is None


def test_prefill_waits_for_a_store_that_falls_behind(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that wait to be written hold device memory.

    So many blocks and no more run ahead of the store.
    """
    worker = make_worker(block_tokens=4)
    worker.open()
    go = Event()
    append = worker.engine.store.append

    def slowly(session: str, rows: torch.Tensor, pages: list[bytes], *, final: bool) -> int:
        assert go.wait(600)
        return append(session, rows, pages, final=final)

    monkeypatch.setattr(worker.engine.store, "append", slowly)
    turn = worker.submit("s", words(100), max_tokens=2)
    assert worker.memory().length <= 16 * 4
    while worker.memory().length < 16 * 4:
        assert not turn.done()
    assert worker.memory().length == 16 * 4
    go.set()
    assert turn.result(600).memory.length == worker.engine.store.length("s") >= 128
