"""A session that gives up its slot between two steps goes on in another as if nothing had been."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.specs import METHODS
from tests.workers.states import comparable
from workers.engine.engine import Engine
from workers.generation.sampling import sample
from workers.generation.steps import Decode
from workers.tasks.turn import run_turn


def preempt(engine: Engine, name: str, other: int) -> int:
    """Let the session give up its slot and get another one; returns the one that it had."""
    session = engine.session(name)
    left = session.slot
    assert left is not None
    engine.preempt(session)
    assert session.slot is None
    engine.cache.release(other)
    taken = engine.cache.claim([8] * engine.model.shape.n_layers)
    engine.swap_in(session)
    assert session.slot != taken
    return taken


def run(engine: Engine, name: str, text: str, preempted: bool) -> pb.TurnDone:
    """Run a turn that repairs, prefills and decodes, preempted before each step if asked for."""
    request = pb.TurnRequest(
        session=name,
        epoch=1,
        messages=[pb.Message(role="user", content=text)],
        generate=True,
        repair=True,
        sampling=pb.Sampling(max_tokens=20, temperature=0.7, seed=3),
    )
    other = engine.cache.claim([8] * engine.model.shape.n_layers)
    resident = engine.swap_in(engine.session(name))
    steps = run_turn(engine, resident, request, lambda _: None)
    answer: Any = None
    try:
        while True:
            wanted = steps.send(answer)
            answer = None
            if isinstance(wanted, Future):
                wanted.result()
            if preempted:
                other = preempt(engine, name, other)
            if isinstance(wanted, Decode):
                logits = engine.forward([engine.resident(name)], torch.tensor([[wanted.token]]))
                (answer,) = sample(logits[:, -1], [wanted.sampler])
    except StopIteration as ended:
        done: pb.TurnDone = ended.value
        for timed in ("seconds", "phase_starts"):
            done.ClearField(timed)
        return done
    finally:
        engine.cache.release(other)


@pytest.mark.parametrize("method", METHODS)
def test_a_turn_that_is_preempted_between_all_its_steps_is_the_same_to_the_bit(
    method: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    done = []
    for preempted in (False, True):
        worker = make_worker(block_tokens=24, recent=8, slots=3)
        worker.open("s", **METHODS[method])
        done.append([run(worker.engine, "s", words(90, seed=n), preempted) for n in range(3)])
        assert worker.engine.session("s").preempted is None
        worker.check()
    plain, interrupted = done
    for turn, other in zip(plain, interrupted, strict=True):
        for each in (turn, other):
            for timed in (each.repair, each.reselections, each.retrieval):
                timed.ClearField("seconds")
            each.state.CopyFrom(comparable(each.state))
            each.memory.tier_bytes.pop("ram")  # which pages stay depends on when their writes end
        assert turn == other


def test_rows_in_host_memory_go_with_a_session_that_is_discarded(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=2)
    worker.open("s")
    worker.turn("s", words(30), max_tokens=4)
    session = worker.engine.session("s")
    worker.engine.preempt(session)
    assert max(worker.engine.memory(session).active_rows) == session.length
    worker.engine.discard(session)
    assert session.preempted is None
    assert worker.scheduler.slots_in_use() == 0
    worker.check()
