"""Sessions come into a worker as they were.

Opened, forked at any turn, rebuilt after pages were lost.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.tasks.turn_log import logged, rebuild
from workers.errors import BadSettings, RowsMissing, StaleEpoch, UnknownSession
from workers.tasks.logged_tokens import fold_turns

PAGE = 64
EVICTING = {"method": "snapkv", "budget": 64}


@pytest.mark.parametrize(
    "spec", [{"method": "full", "budget": 1024}, EVICTING], ids=["full", "evicting"]
)
def test_a_fork_at_the_last_turn_answers_as_its_parent(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    answer: Callable[..., list[int]],
    spec: dict[str, Any],
) -> None:
    worker = make_worker()
    worker.open(**spec)
    first = worker.turn("s", words(150))
    worker.open("child", state=first.state, **spec)
    question = words(7, seed=3)
    assert answer(worker.turn("child", question)) == answer(worker.turn("s", question))
    worker.check()


def test_a_fork_copies_no_whole_page(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(ram_pages=64)
    worker.open()
    first = worker.turn("s", words(300))
    before = worker.engine.store.usage()["nvme"]
    worker.open("child", state=first.state)
    assert worker.engine.store.usage()["nvme"] == before
    assert worker.engine.store.length("child") == first.state.length
    worker.check()


def test_forks_diverge_independently(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    worker = make_worker()
    worker.open()
    state = worker.turn("s", words(90)).state
    texts = [words(9, seed=seed) for seed in range(3)]
    for number, text in enumerate(texts):
        worker.open(f"fork{number}", state=state)
        worker.turn(f"fork{number}", text)
    for number, text in enumerate(texts):
        worker.open("alone", epoch=number + 1)
        worker.turn("alone", words(90), epoch=number + 1)
        worker.turn("alone", text, epoch=number + 1)
        expected = worker.turn("alone", "and then", epoch=number + 1)
        assert answer(worker.turn(f"fork{number}", "and then")) == answer(expected)
    worker.check()


@pytest.mark.parametrize(
    "spec", [{"method": "full", "budget": 1024}, EVICTING], ids=["full", "evicting"]
)
def test_a_fork_at_an_earlier_turn_is_the_session_as_it_was_then(
    make_worker: Callable[..., Any], words: Callable[..., str], spec: dict[str, Any]
) -> None:
    worker = make_worker()
    worker.open(**spec)
    texts = [words(90, seed=seed) for seed in range(3)]
    turns = [worker.turn("s", text) for text in texts]
    log = [logged(turn, text) for turn, text in zip(turns, texts, strict=True)]
    then = turns[1].state
    forked = worker.fork("s", "child", log[:2], **spec)
    assert forked.state.length == then.length
    assert list(forked.state.pending) == list(then.pending)
    assert list(forked.state.recent) == list(then.recent)
    assert forked.state.selection == then.selection
    assert list(worker.turn("child", texts[2]).token_ids) == list(turns[2].token_ids)
    worker.check()


def test_a_fork_at_an_earlier_turn_has_deferred_what_the_session_had_then(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Computed again from the log it is the committed state: appended turns, a recorded answer."""
    spec: dict[str, Any] = {"method": "snapkv", "budget": 60, "repair_rows": 20}
    appending = {"generate": False, "defer_repair": True}
    worker = make_worker(block_tokens=64)
    worker.open(**spec)
    user = [dict[str, Any](role="user", content=words(6, seed=seed)) for seed in range(5)]
    answer: dict[str, Any] = {"role": "assistant", "content": words(5, seed=9)}
    said = [[user[0]], [user[1]], [user[2], answer, user[3]], [user[4]]]
    turns = [worker.turn("s", words(80), max_tokens=4)]
    turns += [worker.turn("s", messages, **appending) for messages in said]
    turns += [worker.turn("s", "and then", max_tokens=4)]
    messages = [
        [{"role": "user", "content": words(80)}],
        *said,
        [{"role": "user", "content": "and then"}],
    ]
    log = [
        pb.LoggedTurn(
            token_ids=done.token_ids,
            prompt_tokens=done.prompt_tokens,
            output_tokens=done.output_tokens,
            messages=[pb.Message(**each) for each in asked]
            + ([done.message] if done.HasField("message") else []),
            deferred_tokens=done.deferred_tokens,
            unsettled_tokens=done.state.unsettled,
        )
        for done, asked in zip(turns, messages, strict=True)
    ]
    deferred = [len(done.state.deferred_signal) for done in turns]
    assert deferred[0] == deferred[-1] == 0 < deferred[1] < deferred[2]
    for count, done in enumerate(turns, 1):
        child = f"child{count}"
        forked = worker.fork("s", child, log[:count], **spec)
        assert list(forked.state.deferred_signal) == list(done.state.deferred_signal)
        assert forked.state == done.state
    worker.check()


def test_a_forked_session_outlives_its_parent(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    worker = make_worker()
    worker.open()
    state = worker.turn("s", words(200)).state
    expected = answer(worker.turn("s", "and then"))
    worker.open("child", state=state)
    worker.scheduler.delete(pb.DeleteRequest(session="s")).result(600)
    request = pb.DeletePagesRequest(page_ids=state.page_ids)
    assert not worker.scheduler.delete_pages(request).result(600), "the child has them"
    assert answer(worker.turn("child", "and then")) == expected
    worker.check()


@pytest.mark.parametrize(
    "spec", [{"method": "full", "budget": 1024}, EVICTING], ids=["full", "evicting"]
)
def test_a_session_that_lost_pages_is_refused_and_rebuilt(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
    spec: dict[str, Any],
) -> None:
    worker = make_worker()
    worker.open(**spec)
    texts = [words(90, seed=seed) for seed in range(2)]
    turns = [worker.turn("s", text) for text in texts]
    state = turns[-1].state
    expected = list(worker.turn("s", "and then").token_ids)
    opened = {"epoch": 3, **spec}
    pages = -(-state.length // PAGE)
    worker.open(state=state, epoch=2, **spec)
    for page in (1, pages - 1):
        lose_page(worker.engine.store, "s", page)
    worker.engine.store.release("s")  # only the tiers say what is there
    with pytest.raises(RowsMissing, match=f"pages 1, {pages - 1}"):
        worker.open(state=state, **opened)
    with pytest.raises(UnknownSession):
        worker.turn("s", "and then", epoch=3)
    rebuilt = rebuild(
        worker, state, [logged(*turn) for turn in zip(turns, texts, strict=True)], **opened
    )
    assert rebuilt.pages == 2
    assert (worker.engine.lost_pages, worker.engine.rebuilt_pages) == (2, 2)
    assert list(worker.turn("s", "and then", epoch=3).token_ids) == expected
    worker.check()


def test_rebuilt_rows_equal_the_lost_ones(
    make_worker: Callable[..., Any], words: Callable[..., str], lose_page: Callable[..., None]
) -> None:
    worker = make_worker()
    worker.open(**EVICTING)
    texts = [words(90, seed=seed) for seed in range(3)]
    turns = [worker.turn("s", text) for text in texts]
    state = turns[-1].state
    store = worker.engine.store
    everything = torch.arange(state.length)
    before = store.gather("s", everything)
    lose_page(store, "s", 2)
    rebuild(
        worker,
        state,
        [logged(*turn) for turn in zip(turns, texts, strict=True)],
        epoch=2,
        **EVICTING,
    )
    torch.testing.assert_close(store.gather("s", everything), before, rtol=1e-4, atol=1e-4)


def test_a_log_that_is_too_short_restores_no_page(
    make_worker: Callable[..., Any], words: Callable[..., str], lose_page: Callable[..., None]
) -> None:
    worker = make_worker()
    worker.open()
    texts = [words(90, seed=seed) for seed in range(2)]
    turns = [worker.turn("s", text) for text in texts]
    state = turns[-1].state
    worker.open(epoch=2, state=state)
    lose_page(worker.engine.store, "s", state.length // PAGE - 1)
    with pytest.raises(RowsMissing, match="ends before"):
        rebuild(worker, state, [logged(turns[0], texts[0])], epoch=3)
    assert worker.scheduler.slots_in_use() == 0


def test_a_late_open_with_an_older_epoch_is_refused(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    worker.open(epoch=3)
    with pytest.raises(StaleEpoch):
        worker.open(epoch=2)
    with pytest.raises(BadSettings):
        worker.open("other", budget=9, method="random")


def test_a_released_session_frees_slot_and_memory(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open(epoch=2)
    state = worker.turn("s", words(90), epoch=2).state
    worker.scheduler.release(pb.ReleaseRequest(session="s", epoch=1)).result(600)
    assert worker.memory("s").in_slot
    worker.scheduler.release(pb.ReleaseRequest(session="s", epoch=2)).result(600)
    assert worker.scheduler.slots_in_use() == 0
    with pytest.raises(UnknownSession):
        worker.memory("s")
    worker.open(epoch=3, state=state)
    assert worker.turn("s", "and then", epoch=3).output_tokens
    worker.check()


def test_a_rebuild_promotes_the_rows_of_logged_repairs_again(
    make_worker: Callable[..., Any], words: Callable[..., str], lose_page: Callable[..., None]
) -> None:
    worker = make_worker()
    spec = {"method": "snapkv", "budget": 80, "repair_rows": 16}
    worker.open(**spec)
    texts = [words(150, seed=seed) for seed in range(3)]
    log = list[pb.LoggedTurn]()
    for text in texts:
        report = worker.repair("s", text).report
        state = (done := worker.turn("s", text)).state
        log.append(logged(done, text))
        log[-1].promoted.extend(report.promoted)
    assert log[1].promoted
    assert log[2].promoted
    store = worker.engine.store
    everything = torch.arange(state.length)
    before = store.gather("s", everything)
    pages = range(-(-state.length // PAGE))
    assert pages[-2] * PAGE > fold_turns(log[:2]).rows, "lost rows were computed over promoted rows"
    for epoch, lost in enumerate((pages[-2:-1], pages), 2):
        for page in lost:
            lose_page(store, "s", page)
        rebuild(worker, state, log, epoch=epoch, **spec)
        torch.testing.assert_close(store.gather("s", everything), before, rtol=1e-4, atol=1e-4)
    for turn in log:
        del turn.promoted[:]
    lose_page(store, "s", pages[-2])
    rebuild(worker, state, log, epoch=4, **spec)
    assert not torch.allclose(store.gather("s", everything), before, rtol=1e-2, atol=1e-2)
