"""Builds a session's configuration: validates its method, its budget and the split over layers."""

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError

from kvrecall.domain.fairness.share import Share
from kvrecall.domain.sessions.automatic_budget import choose_budget
from kvrecall.domain.settings.prefill import Prefill
from kvrecall.domain.settings.reselection import Reselection
from kvrecall.domain.settings.retrieval import Retrieval
from kvrecall.domain.settings.session import LayerBudgets, WorkerOptions
from kvrecall.protocol.convert import worker_options_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers import methods
from workers.client_json import read_json
from workers.engine.session import SessionConfig
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings
from workers.methods import Method, RepairKV
from workers.model.loader import LoadedModel
from workers.primitives import budgets

# A specification's budget that is chosen by the rows that the session has.
AUTOMATIC = 0


def build_config(
    spec: pb.SessionSpec,
    model: LoadedModel,
    settings: WorkerSettings,
    layer_sensitivity: tuple[float, ...] | None,
    committed_rows: Sequence[int] = (),
    length: int = 0,
) -> SessionConfig:
    """Build the configuration of a session of `length` rows. Raises BadSettings and UnknownMethod.

    `layer_sensitivity`: EpiCache's s_l of this model, if it was measured. `committed_rows`: the
    split by sensitivity that the session's state was committed with, which it keeps, whatever is
    measured later or elsewhere. An automatic budget depends on `length`, and nothing is retrieved of a
    session that fits its budget: the session gets another configuration when it grows.
    """
    method = methods.build(spec.method, spec.method_settings)
    options = _read_options(spec)
    read_json("template_arguments", options.template_arguments)
    repair = methods.build_repair(spec.repair_settings)
    split = _parse_layer_budgets(spec, method)
    if spec.budget > settings.max_budget:
        raise BadSettings(
            f"budget {spec.budget} is over this worker's max_budget {settings.max_budget}"
        )
    _require_eviction(method, options.reselect or method.reselection)
    _require_divisible(method, model)
    retrieval = _choose_retrieval(options.retrieve, method)
    reserve = 0 if repair.swap else spec.repair_rows
    uniform = split == "uniform"
    automatic = spec.budget == AUTOMATIC and uniform
    budget = spec.budget or settings.max_budget
    fits = uniform and length <= budget - reserve
    if automatic and not fits:
        budget = choose_budget(length, settings.max_budget)
    retrieved = 0
    if retrieval is not None and not fits:
        retrieved = retrieval.rows(budget, reserve + settings.min_budget)
    return SessionConfig(
        name=spec.session,
        epoch=spec.epoch,
        budget=budget,
        automatic=automatic,
        repair_rows=spec.repair_rows if method.evicts else 0,
        method=method,
        layer_rows=_keep_split(split, committed_rows, model, settings)
        or _split_budget(
            budget, spec, method, repair, retrieved, model, settings, split, layer_sensitivity
        ),
        split=split,
        seed=spec.seed,
        tools=_parse_tools(spec),
        share=Share(spec.tenant, spec.session, spec.weight or 1.0),
        repair=repair,
        prefill=_choose_prefill(options.prefill, method),
        retrieval=retrieval,
        retrieved=retrieved,
        options=options,
        row_key=spec.row_key,
        page_key=spec.page_key,
    )


def needs_sensitivity(
    spec: pb.SessionSpec,
    committed_rows: Sequence[int],
    model: LoadedModel,
    settings: WorkerSettings,
) -> bool:
    """Check if a session's budget can be split only by the layers' sensitivity.

    False for a specification that `build_config` refuses.
    """
    method = methods.METHODS.get(spec.method)
    if method is None or not method.evicts:
        return False
    split = spec.layer_budgets or method.layer_budgets
    return split == "sensitivity" and not _keep_split(split, committed_rows, model, settings)


def _keep_split(
    split: str, committed_rows: Sequence[int], model: LoadedModel, settings: WorkerSettings
) -> tuple[int, ...]:
    """The committed split by sensitivity; empty if there is none, or a layer has too few rows.

    The latter is so when the worker's sinks or recent window have grown since.
    """
    if split != "sensitivity" or len(committed_rows) != model.shape.n_layers:
        return ()
    return tuple(committed_rows) if min(committed_rows) >= settings.min_budget else ()


def _split_budget(
    budget: int,
    spec: pb.SessionSpec,
    method: Method,
    repair: RepairKV,
    retrieved: int,
    model: LoadedModel,
    settings: WorkerSettings,
    split: LayerBudgets,
    layer_sensitivity: tuple[float, ...] | None,
) -> tuple[int, ...]:
    """Rows per head that an eviction keeps, per layer: the budget without the reserve for repair.

    Nor the rows that are retrieved. A repair that swaps rows needs no reserve, but as many rows that it may give up.
    """
    n_layers = model.shape.n_layers
    if not method.evicts:
        return (budget,) * n_layers
    base = budget - retrieved - spec.repair_rows
    floor = settings.min_budget
    if base < floor:
        raise BadSettings(
            f"budget {budget} leaves {base} rows beside repair_rows {spec.repair_rows}; "
            f"sinks, recent window and one row to choose need {floor}"
        )
    alpha = budgets.get_alpha(model.module.config.model_type)
    base = budget - retrieved if repair.swap else base
    rows = budgets.split_budget(
        base, n_layers, split, floor=floor, weights=layer_sensitivity, alpha=alpha
    )
    return budgets.share_within_groups(rows, method.shares_layers, floor=floor)


def _require_eviction(method: Method, reselection: Reselection | None) -> None:
    """Raise BadSettings for a re-selection of a method that keeps all rows."""
    if reselection is not None and not method.evicts:
        raise BadSettings(
            f"reselect: method {method.name} keeps every row, so there is nothing to select anew; "
            "leave reselect out, or take a method that evicts"
        )


def _require_divisible(method: Method, model: LoadedModel) -> None:
    """Raise BadSettings for a method that ranks with parts of the heads do not compute."""
    if model.group.count == 1:
        return
    if method.divides_unevenly:
        raise BadSettings(
            f"method {method.name} gives heads different numbers of rows by the scores of all, which this "
            f"worker, whose heads are divided between {model.group.count} ranks, does not: take another "
            "method, or a worker without --tensor-parallel"
        )
    if method.has_episodes:
        raise BadSettings(
            f"method {method.name} has episodes, which a worker of {model.group.count} ranks does not "
            "build yet: take another method, or a worker without --tensor-parallel"
        )


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


def _read_options(spec: pb.SessionSpec) -> WorkerOptions:
    """Read the options that act in the worker. Raises BadSettings naming the invalid one."""
    try:
        return worker_options_from_wire(spec)
    except ValidationError as error:
        raise BadSettings(methods.describe_error(error)) from error


def _choose_prefill(given: Prefill | None, method: Method) -> Prefill:
    """Return a session's prefill, by default its method's. Raises BadSettings where it acts in no block.

    A method that accumulates over every query computes all of their weights, and would undo what is
    sparse.
    """
    prefill = method.prefill if given is None else given
    sparse = prefill.sparse != "off"
    if prefill.attend == "stored" and not method.evicts:
        raise BadSettings(
            f"research.prefill.attend: method {method.name} keeps every row active; leave it out, or take a "
            "method that evicts"
        )
    if prefill.attend == "stored" and sparse:
        raise BadSettings(
            "research.prefill.attend 'stored' and research.prefill.sparse exclude each other: sparse blocks attend to "
            "lines of the active rows; leave one of them out"
        )
    if sparse and method.observation.accumulate:
        raise BadSettings(
            f"research.prefill.sparse {prefill.sparse!r} and the method {method.name} exclude each other: "
            f"{method.name} sums the attention of every query. Leave prefill.sparse off, or use a "
            "method that observes the last queries, such as snapkv"
        )
    return prefill


def _choose_retrieval(given: Retrieval | None, method: Method) -> Retrieval | None:
    """Return a session's retrieval, by default its method's; None without one.

    Raises BadSettings where there is never anything to retrieve.
    """
    retrieval = method.retrieval if given is None else given
    if retrieval is None or not retrieval.share:
        return None
    if not method.evicts:
        raise BadSettings(
            f"retrieve: method {method.name} keeps every row, so there is nothing to retrieve; "
            "leave retrieve out, or take a method that evicts"
        )
    return retrieval


def _parse_tools(spec: pb.SessionSpec) -> tuple[Any, ...]:
    return tuple(read_json(f"a tool of session {spec.session}", tool) for tool in spec.tools)
