"""Many sessions on one thread: together as alone, in order, and each with its own errors."""

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.domain.page_ids import join_ids, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.errors import StaleEpoch, UnknownSession

SMALL = {
    "full": {},
    "snapkv": {"method": "snapkv", "budget": 60, "repair_rows": 12},
    "streaming_llm": {"method": "streaming_llm", "budget": 45},
    "random": {"method": "random", "budget": 50, "repair_rows": 8, "seed": 5},
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_four_sessions_together_generate_what_transformers_generates(
    family: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker(family, block_tokens=17)
    for name in "0123":
        worker.open(name)
    turns = [
        worker.submit(name, f"{name} {words(40 + 2 * int(name))}", max_tokens=40) for name in "0123"
    ]
    wait(turns, timeout=600)
    for turn in turns:
        done = turn.result()
        assert answer(done) == continuation(family, done.token_ids[: done.prompt_tokens], 40)
    assert (4, 1) in worker.engine.passes, "all four decoded in one forward pass"
    worker.check()


def _talk(
    worker: Any, names: list[str], words: Callable[..., str], together: bool
) -> dict[str, list[int]]:
    """Three turns in each session, each with a repair; what was said, per session."""
    said: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        worker.open(name, **SMALL[name])
    for number in range(3):
        submitted = {}
        for name in names:
            at = list(SMALL).index(name)
            text = words(70 + 9 * at, seed=10 * number + at)
            submitted[name] = worker.submit(name, text, max_tokens=20, repair=True)
            if not together:
                submitted[name].result(600)
        for name, turn in submitted.items():
            said[name] += turn.result(600).token_ids
    return said


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_sessions_tokens_do_not_depend_on_the_batch(
    family: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    limits = {"block_tokens": 24, "recent": 8}
    together = make_worker(family, **limits)
    shared = _talk(together, list(SMALL), words, together=True)
    assert any(sessions > 1 and tokens == 1 for sessions, tokens in together.engine.passes)
    together.check()
    for name in SMALL:
        assert _talk(make_worker(family, **limits), [name], words, together=False) == {
            name: shared[name]
        }


def test_sampling_is_the_same_alone_and_in_a_batch(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    how = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 11}
    alone = make_worker()
    alone.open("s")
    expected = answer(alone.turn("s", words(30), **how))
    worker = make_worker()
    for name in ("a", "s", "b"):
        worker.open(name)
    others = [
        worker.submit(name, words(35, seed=3), temperature=1.5, seed=number)
        for number, name in enumerate("ab")
    ]
    assert answer(worker.submit("s", words(30), **how).result(600)) == expected
    wait(others, timeout=600)
    assert (3, 1) in worker.engine.passes


def test_more_sessions_than_slots_generate_the_same_as_with_a_slot_each(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    said = {}
    for slots in (2, 5):
        worker = make_worker(slots=slots, block_tokens=24, recent=8)
        methods = ["snapkv", "full", "random", "streaming_llm", "snapkv"]
        for number, method in enumerate(methods):
            worker.open(str(number), **{**SMALL[method], "seed": number})
        turns = [
            worker.submit(
                str(number),
                words(40 + 5 * number, seed=10 * turn + number),
                max_tokens=8,
                repair=turn > 0,
            )
            for turn in range(3)
            for number in range(5)
        ]
        said[slots] = [list(turn.result(600).token_ids) for turn in turns]
        assert worker.scheduler.slots_in_use() == slots
        worker.check()
    assert said[2] == said[5]


@pytest.mark.parametrize("block_tokens", [1, 7, 32])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_layer_ever_exceeds_the_budget_and_a_block(
    block_tokens: int,
    bounded_workers: Callable[[int], Any],
    words: Callable[..., str],
    data: st.DataObject,
) -> None:
    worker = bounded_workers(block_tokens)
    method = data.draw(st.sampled_from(["snapkv", "streaming_llm", "random"]))
    repair_rows = data.draw(st.integers(0, 40))
    budget = data.draw(st.integers(worker.engine.settings.min_budget + repair_rows, 120))
    worker.open("s", method=method, budget=budget, repair_rows=repair_rows, epoch=1)
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 40))
        seed = data.draw(st.integers(0, 9))
        generate = data.draw(st.booleans())
        if data.draw(st.booleans()):
            repaired = worker.repair("s", text=words(length, seed=seed)).memory
            assert max(repaired.active_rows) <= budget
        done = worker.turn(
            "s", words(length, seed=seed), generate=generate, repair=data.draw(st.booleans())
        )
        memory = done.memory
        assert all(peak <= budget + block_tokens for peak in memory.peak_rows)
        assert list(memory.bound_rows) == [budget + block_tokens] * len(memory.peak_rows)
        assert max(memory.active_rows) <= budget
        assert memory.promoted_rows == 0
        worker.check()


@pytest.fixture
def bounded_workers(make_worker: Callable[..., Any]) -> Callable[[int], Any]:
    made: dict[int, Any] = {}

    def worker(block_tokens: int) -> Any:
        if block_tokens not in made:
            made[block_tokens] = make_worker(block_tokens=block_tokens, recent=4, slots=1)
        return made[block_tokens]

    return worker


def test_jobs_of_one_session_run_in_order(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    in_a_row = make_worker()
    one_by_one = make_worker()
    in_a_row.open()
    one_by_one.open()
    turns = [in_a_row.submit("s", words(9, seed=number), max_tokens=6) for number in range(5)]
    said = [list(turn.result(600).token_ids) for turn in turns]
    assert said == [
        list(one_by_one.turn("s", words(9, seed=number), max_tokens=6).token_ids)
        for number in range(5)
    ]


@pytest.mark.parametrize(("repair_rows", "copied"), [(0, False), (8, True)])
def test_the_first_token_after_a_restart_waits_for_copies_only_if_a_repair_reads_them(
    repair_rows: int, copied: bool, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The rest is copied into memory behind the turn."""
    spec = {"method": "snapkv", "budget": 64, "repair_rows": repair_rows}
    worker = make_worker(directory="restarted", ram_pages=64)
    worker.open(**spec)
    state = worker.turn("s", words(200), max_tokens=2).state
    worker.close()
    again = make_worker(directory="restarted", ram_pages=64)
    again.open(state=state, **spec)
    memory = again.engine.store._stack.tiers.memory
    first = split_ids(state.page_ids)[:1]
    seen = list[bool]()

    def is_in_memory() -> bool:
        return bool(memory.contains(first)[0])

    def look(_: pb.TurnEvent) -> None:
        seen.append(is_in_memory())

    assert again.turn("s", "hello", max_tokens=2, emit=look).output_tokens == 2
    assert seen[0] is copied
    ends = time.monotonic() + 60
    while not is_in_memory() and time.monotonic() < ends:
        time.sleep(0.01)
    assert is_in_memory()
    again.check()


def test_unknown_sessions_and_stale_epochs_are_refused(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    with pytest.raises(UnknownSession):
        worker.turn("unknown", "hello")
    worker.open(epoch=3)
    with pytest.raises(StaleEpoch):
        worker.turn("s", "hello", epoch=2)
    with pytest.raises(StaleEpoch):
        worker.open(epoch=2)
    assert worker.turn("s", "hello", epoch=3).output_tokens


def test_pages_that_no_session_has_are_listed_and_deleted(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(directory="rows")
    pages = {}
    for seed, name in enumerate(("kept", "lost", "opened")):
        worker.open(name)
        state = worker.turn(name, words(60, seed=seed)).state
        pages[name] = split_ids(state.page_ids)
    worker.close()
    worker = make_worker(directory="rows")
    worker.open("opened", state=state)
    request = pb.ListPagesRequest()
    every = {page for some in pages.values() for page in some}
    assert worker.scheduler.list_pages(request).result(600) == every
    young = pb.ListPagesRequest(older_than_seconds=3600)
    assert worker.scheduler.list_pages(young).result(600) == set()

    def delete(name: str) -> int:
        request = pb.DeletePagesRequest(page_ids=join_ids(pages[name]))
        deleted: int = worker.scheduler.delete_pages(request).result(600)
        return deleted

    assert [delete("lost"), delete("opened"), delete("lost")] == [len(pages["lost"]), 0, 0]
    left = {*pages["kept"], *pages["opened"]}
    assert worker.scheduler.list_pages(request).result(600) == left
    worker.check()
