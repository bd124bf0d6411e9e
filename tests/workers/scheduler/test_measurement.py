"""The layers' sensitivity is measured when a session first needs it, beside all other jobs."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings, Overloaded, ProfileRefused
from workers.model.embedder import Embedder
from workers.rpc.catalog_binding import CatalogBinding
from workers.rpc.service import WorkerService

SENSITIVITY = (0.1, 0.4)
WAIT = 600
NEW = pb.SessionState()


class Measurement:
    """A measurement that ends when it may; `runs` counts its beginnings."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs = 0
        self.error = error
        self.may_end = threading.Event()

    def __call__(self) -> Generator[None, Any, tuple[float, ...]]:
        self.runs += 1
        yield
        while not self.may_end.wait(0.001):
            yield
        if self.error is not None:
            raise self.error
        return SENSITIVITY


def spec(name: str = "s", **options: Any) -> pb.SessionSpec:
    fields: dict[str, Any] = {"method": "snapkv", "layer_budgets": "sensitivity", "budget": 200}
    return pb.SessionSpec(session=name, epoch=1, method_settings="{}", **(fields | options))


def test_one_measurement_serves_all_sessions_and_holds_up_no_turn(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    measurement = Measurement()
    worker = make_worker(measure_sensitivity=measurement)
    assert worker.scheduler.prepare(spec(layer_budgets="uniform"), NEW) is None
    waiting = [worker.scheduler.prepare(spec(), NEW) for _ in range(2)]
    worker.open("other")
    assert len(worker.turn("other", words(40), max_tokens=8).token_ids) > 8
    assert not any(each.done() for each in waiting)
    measurement.may_end.set()
    for each in waiting:
        each.result(WAIT)
    assert measurement.runs == 1
    assert worker.scheduler.prepare(spec(), NEW) is None
    memory = worker.open("s", method="snapkv", layer_budgets="sensitivity", budget=200)
    assert memory.bound_rows[0] < memory.bound_rows[1]


def test_a_committed_split_needs_no_measurement_and_survives_another_one(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    options = {"method": "snapkv", "layer_budgets": "sensitivity", "budget": 60}
    first = make_worker(layer_sensitivity=SENSITIVITY)
    first.open(**options)
    state = first.turn("s", words(100), max_tokens=4).state
    assert len(state.layer_rows) == 2
    assert sum(state.layer_rows) == 2 * 60
    for measured in (None, (0.4, 0.1)):
        measurement = Measurement()
        other = make_worker(layer_sensitivity=measured, measure_sensitivity=measurement)
        request = pb.OpenRequest(spec=spec(budget=60), state=state)
        assert other.scheduler.prepare(request.spec, request.state) is None
        config = other.engine.admit(request.spec, request.state).config
        assert config.layer_rows == tuple(state.layer_rows)
        assert measurement.runs == 0


def test_a_split_that_the_budget_gives_is_not_committed(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open(method="snapkv", budget=60)
    assert not worker.turn("s", words(100), max_tokens=4).state.layer_rows


def test_a_failed_measurement_is_reported_and_tried_again(make_worker: Callable[..., Any]) -> None:
    measurement = Measurement(ProfileRefused("the keys are not finite"))
    measurement.may_end.set()
    worker = make_worker(measure_sensitivity=measurement)
    with pytest.raises(ProfileRefused, match="not finite"):
        worker.scheduler.prepare(spec(), NEW).result(WAIT)
    measurement.error = None
    worker.scheduler.prepare(spec(), NEW).result(WAIT)
    assert measurement.runs == 2


def test_a_worker_that_cannot_measure_says_what_to_do(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    assert worker.scheduler.prepare(spec(), NEW) is None
    with pytest.raises(BadSettings, match="profile-layers"):
        worker.open(method="snapkv", layer_budgets="sensitivity", budget=200)


async def test_an_open_waits_for_a_while_then_is_to_be_sent_again(
    make_worker: Callable[..., Any], tmp_path: Any
) -> None:
    measurement = Measurement()
    worker = make_worker(measure_sensitivity=measurement, measure_seconds=0.05)
    binding = CatalogBinding(tmp_path / "catalog-id")
    service = WorkerService(worker.scheduler, Embedder(), "tiny", binding)
    request = pb.OpenRequest(spec=spec())
    with pytest.raises(Overloaded, match="being measured"):
        await service.open(request)
    assert "s" not in worker.engine.sessions
    again = worker.scheduler.prepare(request.spec, NEW)
    measurement.may_end.set()
    again.result(WAIT)
    assert (await service.open(request)).budget == 200
    assert measurement.runs == 1, "it went on after the refusal"


def test_an_open_is_answered_before_a_gateway_gives_it_up() -> None:
    from services.cluster.settings import WireSettings

    assert WorkerSettings().measure_seconds < WireSettings().open_seconds
