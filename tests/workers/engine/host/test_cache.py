"""A worker's copies of rows stay in one bound, and idle sessions make room."""

import json
from collections.abc import Callable
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.index.key_codes import code_bytes
from workers.retrieval.host_copy import HostCopy

LIMITS = {"block_tokens": 64, "recent": 8, "ram_pages": 256}
SPEC: dict[str, Any] = {
    "method": "snapkv",
    "budget": 64,
    "repair_rows": 16,
    "options": json.dumps({"retrieve": {"share": 0.3}}),
}
SESSIONS = 6


def held_bytes(worker: Any) -> int:
    """Bytes of the copies themselves, of each page once."""
    copies = [session.host_copy for session in worker.engine.sessions.values()]
    held = [copy for copy in copies if copy is not None]
    pages = {page.data_ptr() for copy in held for page in copy.rows.pages}
    codes = dict(each for copy in held for each in codes_of(copy))
    own = sum(copy.own_bytes for copy in held)
    return len(pages) * worker.engine.store.layout.page_bytes + sum(codes.values()) + own


def codes_of(copy: HostCopy) -> list[tuple[int, int]]:
    """Addresses and bytes of the codes of a copy's pages."""
    addresses = copy.codes.addresses.tolist()
    return [(at, copy.codes.nbytes // len(addresses)) for at in addresses]


def room_for_one(worker: Any, length: int) -> int:
    """Bytes of one session's copy, and of a quarter of another's."""
    layout = worker.engine.store.layout
    page_bytes = layout.page_bytes + code_bytes(layout)
    return int(1.25 * page_bytes * -(-length // layout.page_tokens))


def test_a_later_session_of_a_long_lived_worker_has_what_the_first_one_had(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """And says and promotes the same as with memory for all."""

    def use(worker: Any, name: str) -> tuple[Any, ...]:
        worker.open(name, **SPEC)
        done = worker.turn(name, words(300, seed=int(name[1:])), max_tokens=8)
        repaired = worker.repair(name, text="which")
        assert done.retrieval.steps
        assert not done.retrieval.refused
        again = worker.turn(name, words(20), max_tokens=8)
        worker.check()
        return list(done.token_ids), repaired.report.promoted, list(again.token_ids)

    names = [f"s{number}" for number in range(SESSIONS)]
    roomy = make_worker(**LIMITS)
    expected = [use(roomy, name) for name in names]
    length = roomy.memory("s0").length
    limit = room_for_one(roomy, length + 64)
    worker = make_worker(**LIMITS, held_bytes=limit)
    for name, before in zip(names, expected, strict=True):
        assert use(worker, name) == before
        assert worker.engine.sessions[name].host_copy is not None
        # Tokens that the turn took back leave their pages reserved until the next one.
        spare = worker.engine.host_cache.used_bytes - held_bytes(worker)
        layout = worker.engine.store.layout
        assert 0 <= spare <= layout.page_bytes + code_bytes(layout)
        assert worker.engine.host_cache.used_bytes <= limit
    assert worker.engine.sessions["s0"].host_copy is None
    assert worker.engine.host_cache.evictions >= SESSIONS - 1


def test_a_session_that_is_released_keeps_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **SPEC)
    worker.turn("s", words(300), max_tokens=8)
    cache = worker.engine.host_cache
    assert cache.used_bytes
    worker.scheduler._loop.call_and_wait(lambda: worker.engine.unload("s")).result(60)
    assert cache.used_bytes == 0
    assert held_bytes(worker) == 0


def test_no_job_leaves_its_session_pinned(
    make_worker: Callable[..., Any], words: Callable[..., str], until: Callable[..., None]
) -> None:
    """Whether it ends, is cancelled or fails."""
    worker = make_worker(**LIMITS)
    worker.open("s", **SPEC)
    worker.turn("s", words(30), max_tokens=4)
    cache = worker.engine.host_cache
    running = worker.submit("s", words(200), max_tokens=200)
    while "s" not in cache._pinned:
        assert not running.done()
    running.cancel()
    # The loop looks for cancelled jobs after its calls.
    until(lambda: not cache._pinned, "the cancelled job leaves")

    def fail(_: pb.TurnEvent) -> None:
        assert "s" in cache._pinned
        raise OSError("the stream is closed")

    worker.open("s", epoch=2, **SPEC)
    failed = worker.submit("s", words(30), max_tokens=4, epoch=2, emit=fail)
    assert isinstance(failed.exception(60), OSError)
    until(lambda: not cache._pinned, "the failed job leaves")
    worker.open("s", epoch=3, **SPEC)
    worker.turn("s", words(30), max_tokens=4, epoch=3)
    assert not cache._pinned


def test_sessions_over_one_beginning_hold_its_pages_once(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Forks here; a second conversation of an agent has the first one's pages in the same way."""
    worker = make_worker(**LIMITS)
    worker.open("s", **SPEC)
    done = worker.turn("s", words(300), max_tokens=8)
    pages = done.state.length // worker.engine.store.layout.page_tokens
    used = worker.engine.host_cache.used_bytes
    names = [f"f{number}" for number in range(4)]
    answers = []
    for name in names:
        worker.open(name, state=done.state, **SPEC)
        answers.append(list(worker.turn(name, words(5, seed=1), max_tokens=8).token_ids))
    assert all(answer == answers[0] for answer in answers)
    held = [worker.engine.sessions[name].host_copy.rows.addresses.tolist() for name in names]
    assert all(addresses[:pages] == held[0][:pages] for addresses in held)
    # The parent's last page was not full yet when it was taken.
    parent = worker.engine.sessions["s"].host_copy.rows.addresses.tolist()
    assert parent[: pages - 1] == held[0][: pages - 1]
    own = worker.engine.host_cache.used_bytes - used
    assert own <= len(names) * 2 * worker.engine.store.layout.page_bytes
    worker.check()
