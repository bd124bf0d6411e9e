"""A repair with a contrast: an empty message is its neutral signal, observed once."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.errors import BadMessages
from workers.model.tokenizer import ChatTokenizer
from workers.primitives.scoring import attention
from workers.primitives.selection import bursts
from workers.repair.promotion import missing_rows

SIGNAL_SEED = 1
# Pages in memory: for a copy of the rows, and for none.
ROOM = (1024, 0)


def opened(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    ram_pages: int = 1024,
    **settings: Any,
) -> Any:
    """A worker with a session of 200 words in a budget of 60, with room for 20."""
    worker = make_worker(block_tokens=64, recent=8, ram_pages=ram_pages)
    worker.open(
        method="snapkv",
        budget=60,
        repair_rows=20,
        repair_settings=json.dumps(settings),
    )
    worker.turn("s", words(200), max_tokens=4)
    return worker


def repaired(worker: Any, words: Callable[..., str]) -> list[int]:
    return list(worker.repair("s", text=words(6, seed=SIGNAL_SEED)).report.promoted)


def attention_of(worker: Any, token_ids: Sequence[int], missing: Tensor) -> Tensor:
    """Attention to every row, counted where it is evicted, written out."""
    engine = worker.engine
    resident = engine.resident("s")
    session = resident.session
    observed = engine.observe(resident, [*session.unread, *token_ids])
    keys = engine.store.gather("s", torch.arange(session.length))[:, 0]
    positions = torch.arange(session.length, dtype=torch.int32).repeat(keys.shape[1], 1)
    total = torch.zeros(session.length)
    for layer, queries in enumerate(observed.queries):
        weights = attention(queries, keys[layer], positions, observed.positions).amax(2).sum(1)
        total += (weights * missing[layer]).sum(0)
    return total / (len(observed.queries) * observed.queries[0].shape[0])


@pytest.mark.parametrize("room", ROOM)
def test_it_promotes_by_the_signals_attention_less_that_of_an_empty_message(
    room: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Through a worker, against the definition written out."""
    worker = opened(make_worker, words, room, select="bursts", before=1, after=3, contrast=0.7)
    tokenizer: ChatTokenizer = worker.engine.tokenizer
    session = worker.engine.session("s")
    resident = worker.engine.resident("s")
    missing = missing_rows(worker.engine.cache, resident.slot, session.length)
    signal = attention_of(worker, tokenizer.encode(words(6, seed=SIGNAL_SEED)), missing)
    (empty,) = tokenizer.prompt(session.recent, [{"role": "user", "content": ""}], [], True)
    neutral = attention_of(worker, empty.token_ids, missing)
    scores = (signal - 0.7 * neutral).clamp_min(0)
    scores[: worker.engine.settings.sinks] = 0
    tie_break = session.eviction_scores.to_dense(session.length)
    best = bursts(scores, missing.any(0).any(0), tie_break, 20, before=1, after=3)
    assert repaired(worker, words) == best.tolist()
    worker.check()


@pytest.mark.parametrize("select", ["spread", "bursts"])
def test_pages_and_a_copy_promote_the_same_rows(
    select: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    found = [
        repaired(opened(make_worker, words, room, select=select, contrast=1), words)
        for room in ROOM
    ]
    assert found[0] == found[1]


def test_a_contrast_changes_what_is_promoted(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    found = [repaired(opened(make_worker, words, contrast=beta), words) for beta in (0, 1)]
    assert found[0] != found[1]


def test_a_template_that_refuses_an_empty_message_leaves_the_papers_scores(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = repaired(opened(make_worker, words, contrast=0), words)
    worker = opened(make_worker, words, contrast=1)
    render = ChatTokenizer.prompt

    def refusing(self: ChatTokenizer, recent: Any, new: Any, *rest: Any, **more: Any) -> Any:
        if any(not message["content"] for message in new):
            raise BadMessages("an empty message")
        return render(self, recent, new, *rest, **more)

    monkeypatch.setattr(ChatTokenizer, "prompt", refusing)
    assert repaired(worker, words) == plain
