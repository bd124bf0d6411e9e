"""What would stop a server at its start, found before anything is imported that takes seconds."""

import json
import os
from pathlib import Path
from typing import Any

from kvrecall_server.app.errors import BadSetting, CannotServe
from kvrecall_server.app.models import check_model, get_shape_file
from kvrecall_server.app.rank_storage import list_ranks
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start.memory import RowShape, get_free_memory, require_room
from kvstore.errors import DirectoryLockedError, TierSettingsError
from workers.engine.settings import WorkerSettings
from workers.errors import ModelRefused

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GPU_DRIVERS = (Path("/proc/driver/nvidia"), Path("/dev/kfd"))


def check_start(settings: Settings) -> None:
    """Check budget, model, data directory and memory of a process with a worker.

    Raises BadSetting, CannotServe.
    """
    check_budget(settings.worker)
    check_urls(settings)
    try:
        check_model(settings.model)
    except ModelRefused as error:
        raise CannotServe(f"model refused: {error}") from error
    check_data(settings.data, settings.tensor_parallel)
    shape = read_shape(settings)
    free = get_free_memory()
    # With a GPU, the slots are in its memory: the worker compares them once it has loaded the model.
    if shape and free is not None and not any(each.exists() for each in GPU_DRIVERS):
        require_room(shape, settings.worker, free, "memory")


def check_urls(settings: Settings) -> None:
    """Raise BadSetting for a URL of a Redis or a bucket that is none."""
    from kvrecall_server.app.cold_address import require_cold_address
    from kvstore.tiers.redis.address import parse_address

    urls = {"CATALOG_URL": settings.catalog_url, "STORE__REDIS_URL": settings.store.redis_url}
    for name, url in urls.items():
        try:
            if url is not None:
                parse_address(url.get_secret_value())
        except TierSettingsError as error:
            raise BadSetting(f"KVRECALL_{name}: {error}") from error
    try:
        if settings.store.cold_url is not None:
            require_cold_address(settings.store)
    except TierSettingsError as error:
        raise BadSetting(f"KVRECALL_STORE__COLD_URL: {error}") from error


def check_budget(worker: WorkerSettings) -> None:
    """Raise BadSetting for a largest budget under which no session could be created."""
    if worker.max_budget < worker.min_budget:
        raise BadSetting(
            f"--budget {worker.max_budget} leaves no row to choose: {worker.sinks} sinks and the "
            f"{worker.recent} newest rows are never evicted; expected at least {worker.min_budget}"
        )


def check_data(data: Path, ranks: int = 1) -> None:
    """Raise CannotServe for a data directory that cannot be written, or that a process uses.

    ranks: of the worker that is to store rows there.
    """
    from kvstore.fsck import locked_directory

    there = next(each for each in (data, *data.absolute().parents) if each.exists())
    if not there.is_dir():
        raise CannotServe(f"{there} is a file; expected a data directory, named with --data")
    if not os.access(there, os.W_OK | os.X_OK):
        raise CannotServe(f"{there} cannot be written; choose another data directory with --data")
    for rank in list_ranks(ranks):
        try:
            with locked_directory(rank.find_folder(data) / "pages"):
                pass
        except DirectoryLockedError as error:
            raise CannotServe(describe_lock(data)) from error


def describe_lock(data: Path) -> str:
    """Describe a data directory that another process uses."""
    return (
        f"data directory {data} is in use by another kvrecall; "
        "stop that one or choose another with --data"
    )


def read_shape(settings: Settings) -> RowShape | None:
    """Read the shape of a model's rows from its config; None where it is not on this machine yet.

    The data type may turn out to be a larger one, on a CPU without bfloat16.
    """
    config = _read_config(settings)
    try:
        text = config.get("text_config") or config  # of a model that sees as well
        n_heads = text["num_attention_heads"]
        dtype = settings.dtype or ("bfloat16" if settings.quantize else config.get("dtype"))
        itemsize = _ITEM_BYTES.get(str(dtype), 2)
        kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
        n_layers = kinds.count("full_attention")
        if rank := text.get("kv_lora_rank"):
            return RowShape(n_layers, 1, rank + text["qk_rope_head_dim"], itemsize)
        return RowShape(
            n_layers,
            text.get("num_key_value_heads") or n_heads,
            2 * (text.get("head_dim") or text["hidden_size"] // n_heads),
            itemsize,
        )
    except (KeyError, TypeError):
        return None  # whoever loads the model says what is wrong with it


def read_vocabulary(settings: Settings) -> int | None:
    """Read the number of a model's tokens from its config; None as `read_shape`."""
    config = _read_config(settings)
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def _read_config(settings: Settings) -> dict[str, Any]:
    """Read a model's config; empty where it is not on this machine yet, or cannot be read."""
    try:
        file = get_shape_file(settings.model)
        config = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError, ModelRefused):
        return {}
    return config if isinstance(config, dict) else {}
