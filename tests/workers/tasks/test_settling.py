"""What a session that recalls has stored is what the full cache would have, answers included."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.states import full_rows
from tests.workers.tasks.turn_log import logged, rebuild

PAGE = 64
BLOCK = 64
RECALLING: dict[str, Any] = {"method": "icecache", "budget": 56}
LIMITS: dict[str, Any] = {"block_tokens": BLOCK, "recent": 8}
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "reference"]


def settle(worker: Any, name: str, epoch: int = 1) -> pb.SettleResult:
    """Settle a session between turns."""
    request = pb.SettleRequest(session=name, epoch=epoch)
    result: pb.SettleResult = worker.scheduler.settle(request).result(600)
    return result


def read_rows(worker: Any, name: str, length: int) -> torch.Tensor:
    """The session's stored rows, of the first `length` tokens."""
    rows: torch.Tensor = worker.engine.store.gather(name, torch.arange(length))
    return rows


def require_full_rows(
    worker: Any, name: str, state: pb.SessionState, model: Any, token_ids: Sequence[int]
) -> None:
    """Assert that the session is over these tokens, and that its rows are the full cache's.

    state: as it was committed. Of a worker of several ranks, the rows of this one's heads.
    """
    assert state.length == worker.engine.store.length(name)
    assert state.length + len(state.pending) == len(token_ids)
    assert list(state.pending) == list(token_ids[state.length :])
    if state.length:
        rows = read_rows(worker, name, state.length)
        expected = full_rows(model, token_ids[: state.length])[:, :, : rows.shape[2]]
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_rows_of_a_session_with_answers_are_the_full_caches(
    family: str, make_worker: Callable[..., Any], words: Callable[..., str], plain: Any
) -> None:
    worker = make_worker(family, **LIMITS)
    worker.open(**RECALLING)
    token_ids = list[int]()
    for turn in range(4):
        said = {"max_tokens": 70, "temperature": 0.8, "seed": turn}
        done = worker.turn("s", words(45, seed=turn), **said)
        token_ids += done.token_ids
        assert done.memory.length == done.state.length
        assert done.state.length % PAGE == 0
        assert 0 <= done.state.unsettled - (done.output_tokens - 1) < PAGE
        assert done.memory.unsettled == done.state.unsettled
        require_full_rows(worker, "s", done.state, plain(family), token_ids)
        if turn % 2:
            settled = settle(worker, "s").state
            require_full_rows(worker, "s", settled, plain(family), token_ids)
    worker.check()


def test_what_is_settled_in_a_pause_has_the_bits_of_what_its_next_turn_settles(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    for name in ("pause", "turn"):
        worker.open(name, repair_rows=8, **RECALLING | {"budget": 64})
    for turn in range(4):
        said = {"max_tokens": 100, "temperature": 0.9, "seed": turn, "repair": turn == 2}
        done = {name: worker.turn(name, words(30, seed=turn), **said) for name in ("pause", "turn")}
        assert done["pause"].token_ids == done["turn"].token_ids
        assert done["pause"].state == done["turn"].state
        rows = [read_rows(worker, name, done[name].state.length) for name in done]
        assert torch.equal(*rows)
        settled = settle(worker, "pause")
        assert settled.state.length == done["pause"].state.length + settled.settled_tokens
        assert settled.state.length % PAGE == 0 < settled.settled_tokens
        assert len(settled.state.pending) < PAGE
        assert settled.durable
    assert done["turn"].settled_tokens > 0 == done["pause"].settled_tokens
    computed = done["turn"].prefilled_tokens - done["turn"].settled_tokens
    assert done["pause"].prefilled_tokens == computed
    worker.check()


def test_settling_twice_changes_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    worker.open(**RECALLING)
    worker.turn("s", words(40), max_tokens=90)
    first = settle(worker, "s")
    second = settle(worker, "s")
    assert first.settled_tokens > second.settled_tokens == 0
    assert second.state == first.state


def test_a_session_that_holds_all_rows_keeps_the_whole_pages_of_its_answers(
    make_worker: Callable[..., Any], words: Callable[..., str], plain: Any
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    worker.open(**RECALLING | {"budget": 1024})
    token_ids = list[int]()
    for turn in range(3):
        done = worker.turn("s", words(30, seed=turn), max_tokens=40)
        token_ids += done.token_ids
        assert done.memory.unsettled < PAGE
        assert done.state.length >= len(token_ids) - PAGE - 1
        require_full_rows(worker, "s", done.state, plain("qwen2"), token_ids)


def test_rows_from_before_the_first_eviction_stay(
    make_worker: Callable[..., Any], words: Callable[..., str], plain: Any
) -> None:
    """An answer that outgrows the budget leaves the rows that it had computed over all rows."""
    worker = make_worker("qwen2", **LIMITS)
    worker.open(**RECALLING | {"budget": 192})
    prompt = worker.turn("s", words(8), max_tokens=4)
    token_ids = [*prompt.token_ids]
    done = worker.turn("s", words(8, seed=1), max_tokens=300, temperature=1.0, seed=4)
    token_ids += done.token_ids
    assert done.output_tokens > 200
    asked = len(prompt.token_ids) + done.prompt_tokens
    assert asked < done.state.length < len(token_ids) - PAGE
    require_full_rows(worker, "s", done.state, plain("qwen2"), token_ids)
    settled = settle(worker, "s").state
    require_full_rows(worker, "s", settled, plain("qwen2"), token_ids)


def test_an_answer_to_a_prompt_of_less_than_a_page_is_settled_where_it_is_swapped_out(
    make_worker: Callable[..., Any], words: Callable[..., str], plain: Any
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    worker.open(**RECALLING)
    done = worker.turn("s", words(12), max_tokens=240, temperature=1.0, seed=3)
    assert done.prompt_tokens < PAGE
    token_ids = list(done.token_ids)
    require_full_rows(worker, "s", done.state, plain("qwen2"), token_ids)
    worker.engine.swap_out(worker.engine.session("s"))
    settled = settle(worker, "s")
    assert settled.settled_tokens >= 2 * PAGE
    require_full_rows(worker, "s", settled.state, plain("qwen2"), token_ids)
    done = worker.turn("s", words(12, seed=1))
    token_ids += done.token_ids
    require_full_rows(worker, "s", done.state, plain("qwen2"), token_ids)


def test_recorded_text_that_is_appended_in_steps_is_settled(
    make_worker: Callable[..., Any], words: Callable[..., str], plain: Any
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    worker.open(**RECALLING)
    said = [
        {"role": "user", "content": words(40)},
        {"role": "assistant", "content": words(60, seed=1)},
    ]
    done = worker.turn("s", said, generate=False, keep_distribution=True)
    assert done.recorded_tokens > PAGE
    assert done.memory.unsettled >= done.recorded_tokens
    token_ids = list(done.token_ids)
    require_full_rows(worker, "s", done.state, plain("qwen2"), token_ids)
    settled = settle(worker, "s")
    assert settled.settled_tokens
    require_full_rows(worker, "s", settled.state, plain("qwen2"), token_ids)


def test_the_memory_map_has_the_tokens_whose_rows_were_dropped(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    from workers.engine.row_map import map_rows

    worker = make_worker("qwen2", **LIMITS)
    worker.open(**RECALLING)
    state = worker.turn("s", words(12), max_tokens=200, temperature=1.0, seed=3).state
    stop = state.length + state.unsettled
    engine = worker.engine
    request = pb.MapRowsRequest(state=state, stop=stop, columns=stop, tokens=True)
    mapped = map_rows(request, engine.model.shape, engine.settings)
    assert len(mapped.layers[0].active) == stop == len(mapped.scores)
    assert not any(mapped.layers[0].active[state.length :])


class Twin:
    """A session beside another that does the same without ever being interrupted."""

    def __init__(self, worker: Any, words: Callable[..., str]) -> None:
        self.worker, self.words = worker, words
        self.log = list[pb.LoggedTurn]()
        self.done = pb.TurnDone()

    def turn(self, name: str, number: int, epoch: int = 1) -> pb.TurnDone:
        """Run the turn of that number."""
        said: dict[str, Any] = {"max_tokens": 90, "temperature": 0.8, "seed": number}
        done: pb.TurnDone = self.worker.turn(name, self.words(30, seed=number), epoch=epoch, **said)
        return done


def begin(make_worker: Callable[..., Any], words: Callable[..., str], turns: int) -> Any:
    """A worker with the session `s` of so many turns, their log, and the last one's end."""
    worker = make_worker("qwen2", ram_pages=64, **LIMITS)
    twin = Twin(worker, words)
    worker.open(**RECALLING)
    for number in range(turns):
        twin.done = twin.turn("s", number)
        twin.log.append(logged(twin.done, words(30, seed=number)))
    return twin


@pytest.mark.parametrize("settled", [False, True], ids=["unsettled", "settled"])
def test_a_session_that_is_opened_again_goes_on_with_the_same_bits(
    make_worker: Callable[..., Any], words: Callable[..., str], settled: bool
) -> None:
    twin = begin(make_worker, words, 3)
    state = settle(twin.worker, "s").state if settled else twin.done.state
    expected = twin.turn("s", 9)
    rows = read_rows(twin.worker, "s", expected.state.length)
    other = begin(make_worker, words, 3)
    # Whatever another writer had begun is not committed.
    other.turn("s", 5)
    other.worker.open(epoch=2, state=state, **RECALLING)
    assert other.worker.engine.store.length("s") == state.length
    done = other.turn("s", 9, epoch=2)
    assert (done.token_ids, done.state) == (expected.token_ids, expected.state)
    assert torch.equal(read_rows(other.worker, "s", done.state.length), rows)
    other.worker.check()


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("replayed", [False, True], ids=["state", "replayed"])
def test_a_fork_at_any_turn_goes_on_with_the_same_bits(
    make_worker: Callable[..., Any], words: Callable[..., str], at: int, replayed: bool
) -> None:
    twin = begin(make_worker, words, at)
    state = twin.done.state
    expected = twin.turn("s", 9)
    rows = read_rows(twin.worker, "s", expected.state.length)
    other = begin(make_worker, words, 4)
    settle(other.worker, "s")
    if replayed:
        forked = other.worker.fork("s", "child", other.log[:at], **RECALLING).state
        done = other.turn("child", 9)
        # Scores break ties among a repair's candidates; an answer is not decoded for them.
        for each in (forked, state, done.state, expected.state):
            each.ClearField("eviction_scores")
        assert forked == state
    else:
        other.worker.open("child", state=state, **RECALLING)
        done = other.turn("child", 9)
    assert (done.token_ids, done.state) == (expected.token_ids, expected.state)
    assert torch.equal(read_rows(other.worker, "child", done.state.length), rows)
    other.worker.check()


@pytest.mark.parametrize("settled", [False, True], ids=["unsettled", "settled"])
@pytest.mark.parametrize("lost", ["first", "middle", "last", "all"])
def test_lost_pages_are_computed_again_with_the_same_bits(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
    settled: bool,
    lost: str,
) -> None:
    twin = begin(make_worker, words, 4)
    worker = twin.worker
    state = settle(worker, "s").state if settled else twin.done.state
    store = worker.engine.store
    before = read_rows(worker, "s", state.length)
    pages = range(state.length // PAGE)
    chosen = {"first": pages[:1], "middle": pages[3:4], "last": pages[-1:], "all": pages}[lost]
    for page in chosen:
        lose_page(store, "s", page)
    rebuild(worker, state, twin.log, epoch=2, **RECALLING)
    assert torch.equal(read_rows(worker, "s", state.length), before)
    worker.check()


ACTIONS = st.lists(
    st.sampled_from(["answer", "append", "stop", "cancel", "settle", "repair", "reopen", "fork"]),
    min_size=3,
    max_size=9,
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, sizes=st.lists(st.integers(1, 70), min_size=9, max_size=9))
def test_rows_are_the_full_caches_whatever_happens(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    plain: Any,
    actions: list[str],
    sizes: list[int],
) -> None:
    worker = make_worker("qwen2", **LIMITS)
    spec: dict[str, Any] = {"method": "icecache", "budget": 72, "repair_rows": 8}
    worker.open("s0", **spec)
    name, epoch, token_ids = "s0", 1, list[int]()
    state = pb.SessionState()
    for number, (action, size) in enumerate(zip(actions, sizes, strict=False)):
        said: dict[str, Any] = {"max_tokens": 2 * size, "temperature": 0.8, "seed": number}
        text = words(size, seed=number)
        match action:
            case "answer" | "stop":
                said["stop"] = ["e", "a"] if action == "stop" else []
                done = worker.turn(name, text, epoch=epoch, **said)
                token_ids, state = [*token_ids, *done.token_ids], done.state
            case "append":
                done = worker.turn(name, text, generate=False, epoch=epoch)
                token_ids, state = [*token_ids, *done.token_ids], done.state
            case "cancel":
                running = worker.submit(name, text, epoch=epoch, **said)
                if not running.cancel():
                    running.result(600)
                action = "reopen"
            case "settle":
                state = settle(worker, name, epoch).state
            case "repair":
                signal = pb.RepairRequest(session=name, epoch=epoch, trigger="turn", text=text)
                state = worker.scheduler.repair(signal).result(600).state
            case "fork":
                child = f"s{number + 1}"
                if name == "s0" and token_ids:
                    worker.open(child, state=state, epoch=epoch, **spec)
                    name = child
        if action == "reopen" and name == "s0":
            epoch += 1
            worker.open(name, state=state, epoch=epoch, **spec)
        if token_ids:
            require_full_rows(worker, name, state, plain("qwen2"), token_ids)
    worker.check()
