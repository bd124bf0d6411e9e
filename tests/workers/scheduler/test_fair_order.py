"""The order of jobs as a function of what tenants have had, without a model."""

import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.fairness.share import Share
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.generation.steps import Decode
from workers.scheduler.fair_order import MOMENT_SECONDS, FairOrder
from workers.scheduler.job import Job, SlotWork, StoreWork

SLOT: Any = SlotWork(lambda _: iter(()))  # type: ignore[arg-type, return-value]
DECODES: Any = Decode(1, None)  # type: ignore[arg-type]


def make_job(tenant: str, session: str = "s", **state: Any) -> Job:
    """A running turn of a tenant, unless `state` says otherwise."""
    background = state.pop("background", False)
    share = Share(tenant, session, state.pop("weight", 1.0), background)
    job = Job("turn", f"{tenant} {session}", 1, state.pop("work", SLOT), share=share)
    job.running = iter(())  # type: ignore[assignment]
    for name, value in state.items():
        setattr(job, name, value)
    return job


def enter(*jobs: Job) -> FairOrder:
    """An order with these jobs."""
    order = FairOrder()
    for job in jobs:
        order.enter(job)
    return order


STATES = st.sampled_from(["ready", "decoding", "waiting", "waits long"])
JOBS = st.lists(
    st.tuples(st.sampled_from("abc"), STATES, st.booleans(), st.integers(0, 5)),
    min_size=1,
    max_size=8,
)


@given(drawn=JOBS)
def test_a_step_is_put_off_only_for_one_that_comes(
    drawn: list[tuple[str, str, bool, int]],
) -> None:
    """So that no mix of tenants, priorities and service can stop the thread."""
    order = FairOrder()
    jobs = []
    for number, (tenant, state, background, blocks) in enumerate(drawn):
        job = make_job(tenant, str(number), background=background)
        order.enter(job)
        job.decoding = DECODES if state == "decoding" else None
        if state.startswith("wait"):
            job.waiting = Future()
            job.waiting_since = time.monotonic() - (9 if state == "waits long" else 0)
        for _ in range(blocks):
            order.charge(job, 256)
        jobs.append(job)
    chosen = order.next_step(jobs)
    states = Counter(state for _, state, _, _ in drawn)
    if chosen is None:
        assert not states["ready"] or states["decoding"] or states["waiting"]
    else:
        assert chosen.decoding is None
        assert chosen.waiting is None
        others = [job for job in jobs if job.decoding is None and job.waiting is None]
        assert chosen.share.background <= min(job.share.background for job in others)


def test_a_block_waits_while_another_tenant_decodes_that_has_had_less() -> None:
    flood, question = make_job("flood"), make_job("late", decoding=DECODES)
    order = enter(flood)
    order.charge(flood, 256)
    order.enter(question)
    assert order.next_step([flood, question]) is None
    for _ in range(4):
        order.charge_decoding([question])
    assert order.next_step([flood, question]) is flood, "after four steps it has had as much"


def test_blocks_and_steps_of_one_tenant_alternate() -> None:
    prefills, decodes = make_job("t", "1"), make_job("t", "2", decoding=DECODES)
    order = enter(prefills, decodes)
    for _ in range(5):
        order.charge(prefills, 256)
        assert order.next_step([prefills, decodes]) is prefills


def test_a_block_waits_a_moment_for_the_host_and_no_longer() -> None:
    flood, question = make_job("flood"), make_job("late")
    order = enter(flood)
    order.charge(flood, 256)
    order.enter(question)
    question.waiting, question.waiting_since = Future(), time.monotonic() + 60
    assert order.next_step([flood, question]) is None
    question.waiting_since = time.monotonic() - MOMENT_SECONDS
    assert order.next_step([flood, question]) is flood


def test_a_block_waits_a_moment_for_the_turn_of_a_session_that_was_just_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("workers.scheduler.fair_order.time.monotonic", lambda: now[0])
    flood, opening = (
        make_job("flood"),
        make_job("late", opening=(pb.SessionSpec(), pb.SessionState())),
    )
    order = enter(flood)
    order.charge(flood, 256)
    order.enter(opening)
    order.leave(opening)
    assert order.next_step([flood]) is None
    now[0] += 2 * MOMENT_SECONDS
    assert order.next_step([flood]) is flood


def test_preempted_jobs_of_a_tenant_come_before_its_others() -> None:
    preempted, fresh, other = make_job("t", "1"), make_job("t", "2"), make_job("o", "3")
    fresh.running = other.running = None
    order = enter(preempted, fresh, other)
    order.charge(preempted, 256)
    assert order.heads([fresh, other, preempted], ()) == [other, preempted, fresh]


def test_a_session_s_jobs_stay_in_their_order() -> None:
    first, second = make_job("t", background=True), make_job("t")
    order = enter(first, second)
    assert order.heads([first, second], ()) == [first]
    assert order.heads([first, second], {"t s"}) == []


def test_who_holds_most_slots_gives_one_up_the_newest_first() -> None:
    running = [make_job("flood", str(number), submitted=float(number)) for number in range(3)]
    running.append(make_job("other", "3", submitted=9.0))
    order = enter(*running)
    late = make_job("late")
    order.enter(late)
    assert order.choose_preempted(late, running) is running[2]
    assert order.choose_preempted(make_job("flood", "9"), running) is None
    heavy = make_job("heavy", weight=0.5)
    assert order.choose_preempted(heavy, running) is running[2]
    light = make_job("light", weight=0.25)
    assert order.choose_preempted(light, running) is None, "its one slot would be as four"


def test_of_as_many_slots_each_who_is_far_ahead_gives_one_up() -> None:
    ahead = make_job("ahead")
    order = enter(ahead)
    late = make_job("late")
    order.enter(late)
    order.charge(ahead, 512)
    assert order.choose_preempted(late, [ahead]) is None
    order.charge(ahead, 64)
    assert order.choose_preempted(late, [ahead]) is ahead


def test_a_job_that_waits_or_needs_no_slot_is_not_preempted() -> None:
    waits = make_job("flood", "1", waiting=Future())
    stores = make_job("flood", "2", work=StoreWork(lambda _: iter(())))  # type: ignore[arg-type, return-value]
    order = enter(waits, stores)
    late = make_job("late")
    order.enter(late)
    assert order.choose_preempted(late, [waits, stores]) is None


def test_background_work_gives_its_slot_to_any_other_and_takes_none() -> None:
    later = make_job("t", "1", background=True)
    now = make_job("t", "2")
    order = enter(later, now)
    assert order.choose_preempted(now, [later]) is later
    assert order.choose_preempted(later, [now, make_job("t", "3")]) is None


def test_a_job_whose_slot_cannot_be_taken_counts_as_holding_it_and_another_gives_up_its_own() -> (
    None
):
    build, turn, late = make_job("flood", "1", background=True), make_job("flood"), make_job("late")
    order = enter(build, turn, late)
    assert order.choose_preempted(late, [build, turn]) is build
    assert order.choose_preempted(late, [build, turn], {build.session}) is turn
    assert order.choose_preempted(late, [build], {build.session}) is None


def test_what_a_turn_waits_for_is_no_background_work_any_more() -> None:
    repair, turn = make_job("t", "1", background=True), make_job("t", "2")
    order = enter(repair, turn)
    order.charge(turn, 256)
    assert order.next_step([repair, turn]) is turn
    repair.hurry()
    assert repair.stop_requested
    assert order.next_step([repair, turn]) is repair
