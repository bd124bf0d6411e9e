"""Settling of a session between turns, as a job of the scheduler."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.kept_states import store_states
from workers.generation.settling import settle
from workers.generation.steps import Steps


def run_settle(engine: Engine, resident: ResidentSession) -> Steps[pb.SettleResult]:
    """Settle, and make the rows durable. Raises the errors of the store."""
    session = resident.session
    session.require_committed()
    result = pb.SettleResult()
    result.settled_tokens = yield from settle(engine, resident)
    engine.metrics.inc("worker_settled_tokens_total", result.settled_tokens, when="pause")
    store_states(engine, session)
    yield engine.store_io.flush(session)
    result.durable = all(engine.group.gather(engine.store_io.wait_written(session)))
    result.memory.CopyFrom(engine.memory(session))
    result.state.CopyFrom(engine.snapshot(session))
    session.dirty = False
    return result
