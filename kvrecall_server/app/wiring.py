"""Construction of a worker: model, tokenizer, tiers, row store, engine, scheduler.

Imports nothing of the services, so that a worker's process needs no libraries of the gateway.
"""

import hashlib
import time
from collections.abc import Collection
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import structlog
import torch

from kvrecall.metrics.page import Metrics
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall_server.app.calibration import find_profile, measure_once
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.logs import adopt_loggers, hide_variables
from kvrecall_server.app.models import get_recommended_sampling, resolve_model
from kvrecall_server.app.rank_storage import STATES, Rank
from kvrecall_server.app.settings import Quantization, Settings
from kvrecall_server.app.start.memory import (
    STATE_SHARE,
    RowShape,
    divide_memory,
    get_free_memory,
    get_pool_bytes,
    require_room,
)
from kvrecall_server.app.start.preflight import describe_lock
from kvrecall_server.app.tiers import TIERS, cold_tier, durable_tiers
from kvstore.errors import (
    DirectoryLockedError,
    ForeignPageError,
    KvStoreError,
    TierError,
    TierSettingsError,
)
from kvstore.format.page import PageLayout
from kvstore.settings import StoreSettings
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.ram import RamTier
from workers.cache.row_packing import build_row_layout
from workers.engine.engine import Engine, Parts
from workers.engine.host.memory import get_ram_bytes
from workers.engine.settings import WorkerSettings
from workers.engine.stored.stored_sessions import build_state_layout
from workers.errors import ModelRefused, ProfileRefused
from workers.metrics.catalogue import create_metrics
from workers.model import layer_sensitivity
from workers.model.embedder import Embedder
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.rpc.catalog_binding import CatalogBinding
from workers.rpc.service import WorkerService
from workers.scheduler.scheduler import Scheduler


def build_worker(
    settings: Settings, metrics: Metrics | None = None, group: Group | None = None
) -> WorkerService:
    """The worker service that an operator's settings describe. Raises CannotServe.

    `metrics`: those of `create_metrics`; by default of a worker in its gateway's process. `group`: the
    ranks of the worker, of which this process is the first.
    """
    parts = build_parts(settings, metrics, group)
    return _build_service(parts, settings.model, settings.data, settings.worker)


def build_parts(
    settings: Settings, metrics: Metrics | None = None, group: Group | None = None
) -> Parts:
    """The parts of a worker's engine, or of one of its ranks, as `build_worker`. Raises CannotServe."""
    adopt_loggers()  # transformers and others, which are imported by now
    try:
        return _build_parts(
            settings.model,
            settings.data,
            settings.worker,
            ram_bytes=settings.ram_bytes,
            dtype=settings.dtype,
            quantize=settings.quantize,
            divide=settings.device_map == "auto",
            tiers=settings.store,
            metrics=metrics,
            sandbox=settings.sandbox,
            group=group,
        )
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error
    except ProfileRefused as error:
        raise CannotServe(str(error)) from error
    except (KvStoreError, OSError) as error:
        raise CannotServe(_describe_store_error(settings.data, error)) from error
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise CannotServe(
            f"the model and its active rows do not fit {'the GPU' if torch.cuda.is_available() else 'memory'}: "
            f"{str(error).splitlines()[0]}; lower --slots and --budget, or take a smaller model"
        ) from error


def build_worker_service(
    model: str | Path,
    data: Path,
    settings: WorkerSettings,
    *,
    ram_bytes: int | None,
    dtype: str | None = None,
    quantize: Quantization | None = None,
    divide: bool = False,
    tiers: StoreSettings = TIERS,
    metrics: Metrics | None = None,
    sandbox: SandboxSettings | None = None,
) -> WorkerService:
    """The worker service of a model: rows under `data`/pages, layer profile under `data`/profiles.

    `ram_bytes` is the memory for stored rows; None: a share of what is there. Raises ModelRefused,
    ProfileRefused, and kvstore errors when the directory is in use or holds another model's pages;
    CannotServe where slots and stored rows do not fit the memory together.
    """
    parts = _build_parts(
        model,
        data,
        settings,
        ram_bytes=ram_bytes,
        dtype=dtype,
        quantize=quantize,
        divide=divide,
        tiers=tiers,
        metrics=metrics,
        sandbox=sandbox,
    )
    return _build_service(parts, model, data, settings)


def _build_parts(
    model: str | Path,
    data: Path,
    settings: WorkerSettings,
    *,
    ram_bytes: int | None,
    dtype: str | None,
    quantize: Quantization | None,
    divide: bool,
    tiers: StoreSettings,
    metrics: Metrics | None,
    sandbox: SandboxSettings | None,
    group: Group | None = None,
) -> Parts:
    """The parts of an engine; of several ranks each stores its rows in a folder of its own."""
    hide_variables()
    group = group or Alone()
    loaded, tokenizer = _load(str(model), dtype, quantize, divide, group)
    tokenizer = replace(tokenizer, template_seconds=settings.template_seconds)
    ram_bytes = _divide_memory(loaded, settings, ram_bytes)
    profile = find_profile(data, loaded)
    measurable = loaded.max_context >= layer_sensitivity.MIN_TOKENS
    loaded = _choose_chunks(loaded, settings)
    metrics = metrics or create_metrics()
    rank = Rank(group.index, group.count, group.local)
    tiers, rows = rank.divide(tiers), rank.find_folder(data)
    # Of a model with recurrent states these have a share of the memory, and of the tiers' limits.
    state_ram_bytes = ram_bytes // STATE_SHARE if loaded.state_bytes else 0
    tiers = tiers.halve() if loaded.state_bytes else tiers
    store = build_store(loaded, rows, ram_bytes - state_ram_bytes, tiers, metrics)
    states = build_state_store(loaded, rows, state_ram_bytes, tiers)
    return Parts(
        loaded,
        tokenizer,
        store,
        settings,
        profile.sensitivity if profile else None,
        partial(measure_once, loaded, tokenizer, data, str(model)) if measurable else None,
        metrics,
        sandbox,
        states,
    )


def _build_service(
    parts: Parts, model: str | Path, data: Path, settings: WorkerSettings
) -> WorkerService:
    engine = Engine(parts)
    folder = Rank(engine.group.index, engine.group.count).find_folder(data)
    if model_ends := parts.model.unrotated:
        structlog.get_logger().info("sessions end with the model's context", model=model_ends)
    native = engine.native
    runs = "no: torch computes answers that retrieve" if native is None else f"for {native.level}"
    structlog.get_logger().info("native attention", runs=runs)
    if settings.device_codes_bytes:
        found = "on the device" if engine.on_device else "on the host: it takes triton and one GPU"
        structlog.get_logger().info("search of stored rows", runs=found)
    return WorkerService(
        Scheduler(engine),
        Embedder(settings.embedder, parts.model.device),
        str(model),
        CatalogBinding(folder / "pages" / "catalog-id"),
    )


def _load(
    name: str, dtype: str | None, quantize: Quantization | None, divide: bool, group: Group
) -> tuple[LoadedModel, ChatTokenizer]:
    """Load a model by any name that `resolve_model` knows. Raises ModelRefused."""
    log = structlog.get_logger()
    log.info("loading the model", model=name)
    started = time.perf_counter()
    path = resolve_model(name)
    model = load_model(
        path,
        dtype=getattr(torch, dtype) if dtype else None,
        quantize=quantize,
        divide=divide,
        group=group,
    )
    model = replace(model, sampling=get_recommended_sampling(name) or model.sampling)
    tokenizer = load_tokenizer(path, model.eos_token_ids)
    log.info(
        "model loaded",
        layers=model.shape.n_layers,
        context=model.max_context,
        dtype=str(model.dtype).removeprefix("torch."),
        quantize=quantize or "none",
        device=", ".join(map(str, dict.fromkeys(model.devices))),
        sampling=asdict(model.sampling),
        seconds=round(time.perf_counter() - started, 1),
    )
    return model, tokenizer


def _choose_chunks(model: LoadedModel, settings: WorkerSettings) -> LoadedModel:
    """Name the model's rows by the operator's chunks, with which those behind its window are others.

    Raises CannotServe for chunks of which three do not fit the window.
    """
    size = settings.chunk_tokens
    if size is None:
        return model
    if 3 * size > model.max_context:
        raise CannotServe(
            f"chunks of {size} tokens do not fit three times into the model's window of "
            f"{model.max_context}: set KVRECALL_WORKER__CHUNK_TOKENS to a third of it or less"
        )
    name = hashlib.sha256(f"{model.fingerprint} in chunks of {size}".encode()).hexdigest()[:32]
    return replace(model, fingerprint=name)


def _divide_memory(model: LoadedModel, settings: WorkerSettings, ram_bytes: int | None) -> int:
    """Divide the free memory between slots and stored rows; return the bytes of these.

    Raises CannotServe where they do not fit it, or the slots a GPU's.
    """
    rows = _get_row_shape(model, settings, model.devices)
    group = model.group
    free = get_free_memory()
    if group.count > 1:
        free, ram_bytes = _get_share(group, free, get_ram_bytes(ram_bytes))
    on_host = model.device.type != "cuda"
    if not on_host:
        for device in dict.fromkeys(model.devices):
            own = _get_row_shape(model, settings, [device])
            free_bytes = torch.cuda.mem_get_info(device)[0]
            require_room(own, settings, free_bytes, "the GPU's memory")
    elif free is not None:
        require_room(rows, settings, free, "memory")
    pool = get_pool_bytes(rows, settings) if on_host else 0
    return divide_memory(pool, ram_bytes, free)


def _get_share(group: Group, free: int | None, ram_bytes: int) -> tuple[int | None, int]:
    """Get a rank's share of its machine's memory: the least of all ranks', as each sees another moment."""
    shares = group.gather((None if free is None else free // group.local, ram_bytes // group.local))
    known = [each for each, _ in shares if each is not None]
    return min(known, default=None), min(each for _, each in shares)


def _get_row_shape(
    model: LoadedModel, settings: WorkerSettings, devices: Collection[torch.device]
) -> RowShape:
    """Get what decides the bytes of a slot's part on devices."""
    side_bytes = model.get_side_bytes(settings.longest_pass, devices)
    return RowShape.of(model.shape, model.count_row_layers(devices), model.dtype, side_bytes)


def build_store(
    model: LoadedModel,
    data: Path,
    ram_bytes: int | None = None,
    tiers: StoreSettings = TIERS,
    metrics: Metrics | None = None,
) -> RowStore:
    """The row store of a model: a RAM tier of `ram_bytes`, or a third of the memory, then `durable_tiers`.

    Behind them the bucket, if one is configured.
    """
    on_call = None if metrics is None else partial(_observe_call, metrics)
    layout = page_layout(model)
    bucket = cold_tier(layout, tiers)
    stack: list[Tier] = [RamTier(get_ram_bytes(ram_bytes)), *durable_tiers(layout, data, tiers)]
    return RowStore(
        layout,
        stack,
        codecs=tiers.codecs,
        on_call=on_call,
        bucket=bucket,
        cold_after_seconds=tiers.cold_after_seconds,
    )


def build_state_store(
    model: LoadedModel, data: Path, ram_bytes: int, tiers: StoreSettings = TIERS
) -> RowStore | None:
    """The store of a model's recurrent states, as `build_store`; None for a model without any."""
    layout = state_layout(model)
    if layout is None:
        return None
    bucket = cold_tier(layout, tiers)
    stack: list[Tier] = [RamTier(ram_bytes), *durable_tiers(layout, data / STATES, tiers)]
    return RowStore(layout, stack, bucket=bucket, cold_after_seconds=tiers.cold_after_seconds)


def _observe_call(metrics: Metrics, tier: str, operation: str, seconds: float) -> None:
    metrics.observe("tier_call_seconds", seconds, tier=tier, op=operation)


def page_layout(model: LoadedModel) -> PageLayout:
    """The page layout of a model's rows: shape, dtype, fingerprint of the weights."""
    return build_row_layout(model.shape, model.side, model.dtype, model.fingerprint)


def state_layout(model: LoadedModel) -> PageLayout | None:
    """The page layout of a model's recurrent states; None for a model without any."""
    return build_state_layout(model.state_bytes, model.fingerprint) if model.state_bytes else None


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(
        error
    )


def _describe_store_error(data: Path, error: Exception) -> str:
    if isinstance(error, DirectoryLockedError):
        return describe_lock(data)
    if isinstance(error, ForeignPageError):
        return (
            f"data directory {data} holds another model's rows, or another --dtype's or "
            "--quantize's; choose another with --data"
        )
    if isinstance(error, (TierError, TierSettingsError)):
        return f"rows cannot be stored: {error}"
    return f"data directory {data} cannot be used: {error}"
