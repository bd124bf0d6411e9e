"""A page whose id follows from its tokens has the rows of a full cache, whatever the session's settings."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvrecall.domain.page_ids import is_random, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.states import full_rows
from tests.workers.tasks.turn_log import logged

PAGE = 64
LIMITS: dict[str, Any] = {"block_tokens": 64, "recent": 8}
ATTEND_STORED = json.dumps({"prefill": {"attend": "stored"}})
SPARSE = json.dumps({"prefill": {"sparse": "on", "sample": 16, "band": 16, "max_density": 1}})
RESELECT = json.dumps({"reselect": {"every": 4, "first": 4}})
SPECS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "recalls": {"method": "icecache", "budget": 56},
    "bounded": {"method": "snapkv", "budget": 160, "repair_rows": 16},
    "roomy": {"method": "snapkv", "budget": 400},
    "small": {"method": "snapkv", "budget": 60},
    "sums": {"method": "h2o", "budget": 160},
    "stored": {"method": "snapkv", "budget": 60, "options": ATTEND_STORED},
    "window": {"method": "streaming_llm", "budget": 60, "options": ATTEND_STORED},
    "sparse": {"method": "full", "options": SPARSE},
    "selects": {"method": "snapkv", "budget": 200, "options": RESELECT},
}


def get_ids(done: pb.TurnDone) -> tuple[bytes, ...]:
    """The ids of a session's pages after a turn."""
    return split_ids(done.state.page_ids)


def speak(worker: Any, name: str, words: Callable[..., str]) -> tuple[pb.TurnDone, list[int]]:
    """Three turns with answers, repairs before some; returns the last, and all tokens."""
    token_ids: list[int] = []
    for turn in range(3):
        said = {"max_tokens": 40, "temperature": 0.8, "seed": turn}
        done = worker.turn(name, words(110, seed=turn), repair=turn == 1, **said)
        token_ids += done.token_ids
    return done, token_ids


@pytest.mark.parametrize("kind", SPECS)
def test_pages_named_by_tokens_have_the_full_cache_s_rows(
    kind: str, make_worker: Callable[..., Any], words: Callable[..., str], plain: Any
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    worker.open(**{"budget": 1024, **SPECS[kind]})
    done, token_ids = speak(worker, "s", words)
    ids = get_ids(done)
    assert len(ids) == done.state.length // PAGE >= 5
    expected = full_rows(plain("qwen2"), token_ids[: done.state.length])
    rows = worker.engine.store.gather("s", torch.arange(done.state.length))
    exact = [
        bool(torch.allclose(ours, theirs, rtol=0, atol=1e-4))
        for ours, theirs in zip(rows.split(PAGE, 3), expected.split(PAGE, 3), strict=True)
    ]
    named = [not is_random(id) for id in ids]
    assert all(rows_are for rows_are, is_named in zip(exact, named, strict=True) if is_named)
    assert named == sorted(named, reverse=True), "what follows a random id is random"
    if kind in ("full", "recalls", "window"):
        assert all(named)
    elif kind == "sparse":
        assert not any(named)
    else:
        assert any(named)
    worker.check()


def test_ids_do_not_depend_on_settings_turns_or_interruptions(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    turns: Sequence[str] = [words(150, seed=seed) for seed in range(3)]
    recalling: dict[str, Any] = {"method": "icecache", "budget": 56}
    specs: dict[str, dict[str, Any]] = {"full": {}, "recalls": recalling, "again": recalling}
    found = []
    for name, options in specs.items():
        worker.open(name, **options, row_key=b"key")
        log = []
        for epoch, text in enumerate(turns, 2):
            done = worker.turn(name, text, generate=False, epoch=epoch - 1)
            log.append(logged(done, text))
            worker.open(name, state=done.state, epoch=epoch, **options, row_key=b"key")
        found.append(get_ids(done))
    assert found[0] == found[1] == found[2]
    child = worker.fork("again", "child", log[:1], **recalling, row_key=b"key")
    assert split_ids(child.state.page_ids) == found[0][: child.state.length // PAGE]
    worker.check()


def test_another_key_gives_other_ids(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    ids = []
    for name, key in (("one", b"one"), ("same", b"one"), ("other", b"other")):
        worker.open(name, row_key=key)
        ids.append(get_ids(worker.turn(name, words(150), generate=False)))
    assert ids[0] == ids[1]
    assert not set(ids[0]) & set(ids[2])
