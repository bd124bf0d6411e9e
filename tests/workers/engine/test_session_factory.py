"""A session's configuration is validated, and its budget split over the layers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvrecall.domain.settings.reselection import Reselection
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.session import SessionConfig
from workers.engine.session_factory import build_config, needs_sensitivity
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings
from workers.model.loader import LoadedModel

SETTINGS = WorkerSettings(sinks=2, recent=5, max_budget=200)


@pytest.fixture
def configure(loaded: Callable[[str], LoadedModel]) -> Callable[..., SessionConfig]:
    """configure(sensitivity, committed, **spec).

    For a model with three layers, by default 40 rows per head.
    """

    def make(
        sensitivity: tuple[float, ...] | None = None, committed: Sequence[int] = (), **spec: Any
    ) -> SessionConfig:
        wanted = {"session": "s", "method": "snapkv", "budget": 50, "repair_rows": 10, **spec}
        return build_config(
            pb.SessionSpec(**wanted), loaded("qwen2"), SETTINGS, sensitivity, committed
        )

    return make


def test_by_default_every_layer_gets_the_same(configure: Callable[..., SessionConfig]) -> None:
    assert configure().layer_rows == (40, 40, 40)
    assert configure(layer_budgets="uniform").layer_rows == (40, 40, 40)


def test_a_pyramid_falls_with_depth(configure: Callable[..., SessionConfig]) -> None:
    rows = configure(layer_budgets="pyramid").layer_rows
    assert rows[0] > rows[1] > rows[2] >= SETTINGS.min_budget
    assert sum(rows) == 3 * 40
    assert configure(method="pyramidkv").layer_rows == rows, "the method's own way"


def test_the_sessions_split_overrides_its_methods(configure: Callable[..., SessionConfig]) -> None:
    assert configure(method="pyramidkv", layer_budgets="uniform").layer_rows == (40, 40, 40)


def test_sensitive_layers_get_more(configure: Callable[..., SessionConfig]) -> None:
    rows = configure((0.1, 0.3, 0.2), layer_budgets="sensitivity").layer_rows
    assert rows[0] < rows[2] < rows[1]
    assert sum(rows) == 3 * 40


def test_a_committed_split_stays_whatever_was_measured_since(
    configure: Callable[..., SessionConfig],
) -> None:
    kept = configure((0.1, 0.3, 0.2), layer_budgets="sensitivity").layer_rows
    for measured in (None, (0.3, 0.2, 0.1)):
        assert configure(measured, kept, layer_budgets="sensitivity").layer_rows == kept


def test_a_committed_split_is_not_kept_where_it_does_not_fit(
    configure: Callable[..., SessionConfig],
) -> None:
    measured = (0.1, 0.3, 0.2)
    split = configure(measured, layer_budgets="sensitivity").layer_rows
    for other in ((SETTINGS.min_budget - 1, 50, 63), (40, 80)):
        assert configure(measured, other, layer_budgets="sensitivity").layer_rows == split
    assert configure(measured, (20, 60, 40), layer_budgets="uniform").layer_rows == (40, 40, 40)


def test_a_sensitivity_is_needed_for_a_split_that_was_not_committed(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("qwen2")

    def needed(committed: Sequence[int] = (), **spec: Any) -> bool:
        return needs_sensitivity(pb.SessionSpec(budget=50, **spec), committed, model, SETTINGS)

    assert needed(method="epicache")
    assert needed(method="snapkv", layer_budgets="sensitivity")
    assert not needed((30, 50, 40), method="epicache")
    assert not needed(method="epicache", layer_budgets="uniform")
    assert not needed(method="snapkv")
    assert not needed(method="full", layer_budgets="sensitivity")
    assert not needed(method="no-such-method", layer_budgets="sensitivity")


def test_layers_that_share_a_selection_have_the_same_budget(
    configure: Callable[..., SessionConfig],
) -> None:
    rows = configure((0.1, 0.3, 0.2), method="chunkkv", layer_budgets="sensitivity").layer_rows
    assert rows[0] == rows[1]
    assert sum(rows) == 3 * 40


def test_a_method_that_keeps_every_row_has_no_reserve(
    configure: Callable[..., SessionConfig],
) -> None:
    config = configure(method="full", budget=5)
    assert config.repair_rows == 0
    assert config.layer_rows == (5, 5, 5)


@pytest.mark.parametrize(
    ("spec", "message"),
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
def test_impossible_settings_are_refused(
    spec: dict[str, Any], message: str, configure: Callable[..., SessionConfig]
) -> None:
    with pytest.raises(BadSettings, match=message):
        configure(**spec)


def test_a_method_that_keeps_every_row_refuses_re_selections(
    configure: Callable[..., SessionConfig],
) -> None:
    with pytest.raises(BadSettings, match="full keeps every row"):
        configure(method="full", options='{"reselect": {}}')


@pytest.mark.parametrize(
    ("method", "settings", "options"),
    [
        ("loopserve", '{"every": 16, "token_share": 0, "window": 8}', ""),
        ("snapkv", '{"window": 8}', '{"reselect": {"every": 16, "token_share": 0}}'),
        ("tova", "{}", '{"reselect": {"every": 16, "token_share": 0}}'),
    ],
)
def test_a_session_keeps_the_queries_of_its_re_selections_whatever_its_method_observes(
    method: str, settings: str, options: str, configure: Callable[..., SessionConfig]
) -> None:
    config = configure(method=method, method_settings=settings, options=options)
    assert config.method.observation.window < 16
    assert config.kept_queries == 16


def test_re_selections_of_whole_tokens_keep_eight_queries_whatever_their_interval(
    configure: Callable[..., SessionConfig],
) -> None:
    config = configure(method="tova", options='{"reselect": {"every": 16}}')
    assert config.kept_queries == 8


def test_a_session_s_own_re_selection_comes_before_its_method_s(
    configure: Callable[..., SessionConfig],
) -> None:
    of_method = configure(method="loopserve", method_settings='{"token_share": 0}').reselection
    own = configure(method="loopserve", options='{"reselect": {"every": 4}}').reselection
    assert of_method == Reselection(token_share=0)
    assert own == Reselection(every=4)


@pytest.mark.parametrize("spec", [{"tools": ["{"]}, {"options": '{"template_arguments": "{"}'}])
def test_texts_of_the_wire_that_are_not_json_are_refused_by_name(
    configure: Callable[..., SessionConfig], spec: dict[str, Any]
) -> None:
    with pytest.raises(BadSettings, match="is not JSON"):
        configure(**spec)
