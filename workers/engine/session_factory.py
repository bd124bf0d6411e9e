"""Builds a session's configuration: validates its method, its budget and the split over layers."""

import json
from typing import Any, get_args

from kvrecall.domain.session_settings import LayerBudgets
from kvrecall.protocol.convert import worker_options_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers import methods
from workers.engine.session import SessionConfig
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings
from workers.methods import Method, RepairKV
from workers.model.loader import LoadedModel
from workers.primitives import budgets


def build_config(
    spec: pb.SessionSpec,
    model: LoadedModel,
    settings: WorkerSettings,
    layer_sensitivity: tuple[float, ...] | None,
) -> SessionConfig:
    """Build the configuration of a new session. Raises BadSettings and UnknownMethod.

    `layer_sensitivity`: EpiCache's s_l of this model, if it was measured.
    """
    method = methods.build(spec.method, spec.method_settings)
    repair, scan = methods.build_repair(spec.repair_settings, spec.repair_scan)
    if spec.budget > settings.max_budget:
        raise BadSettings(
            f"budget {spec.budget} is over this worker's max_budget {settings.max_budget}"
        )
    return SessionConfig(
        name=spec.session,
        epoch=spec.epoch,
        budget=spec.budget,
        repair_rows=spec.repair_rows if method.evicts else 0,
        method=method,
        layer_rows=_split_budget(spec, method, repair, model, settings, layer_sensitivity),
        seed=spec.seed,
        tools=_parse_tools(spec),
        repair=repair,
        repair_scan=scan,
        options=worker_options_from_wire(spec),
    )


def _split_budget(
    spec: pb.SessionSpec,
    method: Method,
    repair: RepairKV,
    model: LoadedModel,
    settings: WorkerSettings,
    layer_sensitivity: tuple[float, ...] | None,
) -> tuple[int, ...]:
    """Rows per head that an eviction keeps, per layer: the budget without the reserve for repair.

    A repair that swaps rows needs no reserve, but as many rows that it may give up.
    """
    how = _parse_layer_budgets(spec, method)
    n_layers = model.shape.n_layers
    if not method.evicts:
        return (spec.budget,) * n_layers
    base = spec.budget - spec.repair_rows
    floor = settings.min_budget
    if base < floor:
        raise BadSettings(
            f"budget {spec.budget} leaves {base} rows beside repair_rows {spec.repair_rows}; "
            f"sinks, recent window and one row to choose need {floor}"
        )
    alpha = budgets.get_alpha(model.module.config.model_type)
    base = spec.budget if repair.swap else base
    rows = budgets.split_budget(
        base, n_layers, how, floor=floor, weights=layer_sensitivity, alpha=alpha
    )
    return budgets.share_within_groups(rows, method.shares_layers, floor=floor)


def _parse_layer_budgets(spec: pb.SessionSpec, method: Method) -> LayerBudgets:
    if not spec.layer_budgets:
        return method.layer_budgets
    known: tuple[LayerBudgets, ...] = get_args(LayerBudgets)
    for how in known:
        if how == spec.layer_budgets:
            return how
    raise BadSettings(
        f"there are no layer_budgets {spec.layer_budgets!r}; there are {', '.join(known)}"
    )


def _parse_tools(spec: pb.SessionSpec) -> tuple[Any, ...]:
    try:
        return tuple(json.loads(tool) for tool in spec.tools)
    except json.JSONDecodeError as error:
        raise BadSettings(f"a tool of session {spec.session} is not JSON: {error}") from error
