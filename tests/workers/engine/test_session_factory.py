"""What a session asks for is checked and split over the layers before anything is made."""

from collections.abc import Callable
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.engine.session import WorkerSession
from workers.engine.session_factory import new_session
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings
from workers.model.loader import LoadedModel

SETTINGS = WorkerSettings(sinks=2, recent=5, max_budget=200)


@pytest.fixture
def admit(loaded: Callable[[str], LoadedModel]) -> Callable[..., WorkerSession]:
    """admit(sensitivity, **spec): a session of a model with three layers, of 40 rows per head if not told otherwise."""

    def make(sensitivity: tuple[float, ...] | None = None, **spec: Any) -> WorkerSession:
        wanted = {"session": "s", "method": "snapkv", "budget": 50, "repair_rows": 10, **spec}
        return new_session(wire.SessionSpec(**wanted), loaded("qwen2"), SETTINGS, sensitivity)

    return make


def test_without_a_word_every_layer_gets_the_same(admit: Callable[..., WorkerSession]) -> None:
    assert admit().layer_rows == (40, 40, 40)
    assert admit(layer_budgets="uniform").layer_rows == (40, 40, 40)


def test_a_pyramid_falls_with_depth(admit: Callable[..., WorkerSession]) -> None:
    rows = admit(layer_budgets="pyramid").layer_rows
    assert rows[0] > rows[1] > rows[2] >= SETTINGS.min_budget
    assert sum(rows) == 3 * 40
    assert admit(method="pyramidkv").layer_rows == rows, "the method's own way"


def test_the_session_has_the_last_word_over_its_method(admit: Callable[..., WorkerSession]) -> None:
    assert admit(method="pyramidkv", layer_budgets="uniform").layer_rows == (40, 40, 40)


def test_sensitive_layers_get_more(admit: Callable[..., WorkerSession]) -> None:
    rows = admit((0.1, 0.3, 0.2), layer_budgets="sensitivity").layer_rows
    assert rows[0] < rows[2] < rows[1]
    assert sum(rows) == 3 * 40


def test_layers_that_share_a_selection_have_the_same_budget(
    admit: Callable[..., WorkerSession],
) -> None:
    rows = admit((0.1, 0.3, 0.2), method="chunkkv", layer_budgets="sensitivity").layer_rows
    assert rows[0] == rows[1]
    assert sum(rows) == 3 * 40


def test_a_method_that_keeps_every_row_has_no_reserve(admit: Callable[..., WorkerSession]) -> None:
    session = admit(method="full", budget=5)
    assert session.repair_rows == 0
    assert session.layer_rows == (5, 5, 5)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"layer_budgets": "sensitivity"}, "kvrecall profile-layers"),
        ({"method": "epicache"}, "kvrecall profile-layers"),
        ({"layer_budgets": "round"}, "'round'; there are uniform, pyramid, sensitivity"),
        ({"budget": 17}, "leaves 7 rows"),
        ({"budget": 17, "layer_budgets": "pyramid"}, "leaves 7 rows"),
        ({"budget": 201}, "max_budget 200"),
        ({"tools": ["{"]}, "not JSON"),
    ],
)
def test_what_cannot_be_is_refused(
    spec: dict[str, Any], told: str, admit: Callable[..., WorkerSession]
) -> None:
    with pytest.raises(BadSettings, match=told):
        admit(**spec)
