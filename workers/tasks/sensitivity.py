"""Measures the layers' sensitivity, when a session's budget cannot be split without it."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session_factory import needs_sensitivity
from workers.generation.steps import Steps


def awaits_sensitivity(engine: Engine, spec: pb.SessionSpec, state: pb.SessionState) -> bool:
    """Check if `run_measurement` has to run before such a session is opened."""
    if engine.layer_sensitivity is not None or engine.measure_sensitivity is None:
        return False
    return needs_sensitivity(spec, state.layer_rows, engine.model, engine.settings)


def run_measurement(engine: Engine) -> Steps[None]:
    """Measure the sensitivity, for all sessions, unless it is known. Raises ProfileRefused."""
    if engine.layer_sensitivity is None and engine.measure_sensitivity is not None:
        engine.layer_sensitivity = yield from engine.measure_sensitivity()
