"""Sizes of a deployment: memory and disk for so many sessions of a model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvrecall_server.app.settings import Settings
from kvrecall_server.app.start.catalog_size import (
    IN_FILE,
    IN_REDIS,
    get_catalog_bytes,
    get_worker_state_bytes,
)
from kvrecall_server.app.start.memory import STATE_SHARE, RowShape, get_pool_bytes
from kvstore.format.codec import Codec, payload_bytes
from kvstore.format.page import HEADER_BYTES, PageLayout
from kvstore.index.key_codes import code_bytes
from kvstore.tiers.ram import KEPT_SHARE
from workers.engine.settings import WorkerSettings
from workers.engine.stored.stored_sessions import build_state_layout
from workers.model.sizes import ModelSizes

# States that every session keeps beside one for each `interval`: the first one, and the last two.
_LEAST_STATES = 3


@dataclass(frozen=True)
class Load:
    """What a deployment is to hold.

    Attributes:
        sessions: Stored sessions.
        tokens: Tokens of each.
        shared: Of these, the first ones that all sessions have: system prompt and tools.
        turns: Of each session.
        at_once: Sessions that have a turn at the same time.
    """

    sessions: int
    tokens: int
    shared: int
    turns: int = 1
    at_once: int = 1


@dataclass(frozen=True)
class Deployment:
    """What the settings say of a deployment.

    Attributes:
        worker: Settings of each worker.
        places: Where pages lie, with their codec there: each place has all of them.
        in_redis: The catalog is in a Redis, not in a file.
        kept_states: Last turns of a session whose states the catalog keeps.
        ranks: Of each worker; the sizes of the model are those of one.
    """

    worker: WorkerSettings
    places: Mapping[str, Codec]
    in_redis: bool = False
    kept_states: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, settings: Settings) -> "Deployment":
        """The deployment of these settings."""
        store = settings.store
        _, in_files, *below = store.codecs
        places = {"files of the workers": in_files}
        if below:
            places["Redis"] = below[0]
        if store.cold_url is not None:
            places["bucket, of sessions that sleep"] = in_files
        return cls(
            settings.worker,
            places,
            in_redis=settings.catalog_url is not None,
            kept_states=settings.service.kept_states,
            ranks=settings.tensor_parallel,
        )


@dataclass(frozen=True)
class Need:
    """Bytes that something takes.

    Attributes:
        what: What takes them.
        count: How many there are.
        each_bytes: Bytes of one.
        total_bytes: Bytes of all.
        where: Where they lie.
    """

    what: str
    count: int
    each_bytes: int
    total_bytes: int
    where: str


@dataclass(frozen=True)
class Sizes:
    """What a deployment takes.

    Attributes:
        needs: Bytes by what takes them, the catalog's last.
        at_once: Sessions that have a turn at the same time.
        workers: That have slots for these.
        device_bytes: Of weights and active rows on each device of a worker.
        ram_bytes: Of a worker's `--ram` with which it reads no row of a session in a slot from files.
    """

    needs: tuple[Need, ...]
    at_once: int
    workers: int
    device_bytes: int
    ram_bytes: int


def add_up(model: ModelSizes, load: Load, deployment: Deployment) -> Sizes:
    """Add up what a load takes."""
    needs = tuple(list_needs(model, load, deployment))
    on_devices = sum(each.total_bytes for each in needs[:2])
    return Sizes(
        needs,
        load.at_once,
        -(-load.at_once // deployment.worker.slots),
        on_devices // deployment.ranks,
        get_ram_setting(model, load, deployment),
    )


def list_needs(model: ModelSizes, load: Load, deployment: Deployment) -> Iterator[Need]:
    """List what each worker takes, and what all stored sessions take."""
    yield from _list_worker_needs(model, load, deployment)
    ranks, sessions = deployment.ranks, load.sessions
    for place, codec in deployment.places.items():
        shared = ranks * get_stored_bytes(model.layout, load.shared, codec)
        own = ranks * get_stored_bytes(model.layout, load.tokens, codec) - shared
        yield Need("stored rows of a session", sessions, own, sessions * own + shared, place)
    if model.state_bytes:
        each = ranks * count_states(model, load.tokens) * _get_state_bytes(model)
        for place in deployment.places:
            yield Need("stored states of a session", sessions, each, sessions * each, place)
    catalog = _get_catalog_bytes(model, load, deployment)
    place = "Redis of the catalog" if deployment.in_redis else "file of the gateway"
    yield Need("catalog of a session", sessions, catalog, sessions * catalog, place)


def _list_worker_needs(model: ModelSizes, load: Load, deployment: Deployment) -> Iterator[Need]:
    ranks, settings = deployment.ranks, deployment.worker
    device = "device of each worker" if ranks == 1 else "devices of each worker's ranks, evenly"
    yield Need("weights", ranks, model.weight_bytes, ranks * model.weight_bytes, device)
    side_bytes = model.get_side_bytes(settings.longest_pass)
    shape = RowShape.of(model.shape, model.shape.n_layers, model.dtype, side_bytes)
    pool = ranks * get_pool_bytes(shape, settings)
    slots = settings.slots
    yield Need("active rows of a slot", slots, pool // slots, pool, device)
    copy = ranks * _count_pages(model.layout, load.tokens) * get_copy_bytes(model.layout)
    yield Need("rows of a session in a slot", slots, copy, slots * copy, "memory of each worker")


def _get_catalog_bytes(model: ModelSizes, load: Load, deployment: Deployment) -> int:
    known = IN_REDIS if deployment.in_redis else IN_FILE
    heads = deployment.ranks * model.shape.n_kv_heads
    layers, settings = model.shape.n_layers, deployment.worker
    state = get_worker_state_bytes(layers, heads, load.tokens, load.turns, settings)
    return get_catalog_bytes(known, state, load.turns, load.tokens, deployment.kept_states)


def get_ram_setting(model: ModelSizes, load: Load, deployment: Deployment) -> int:
    """Return the bytes of `--ram` with which the rows of all sessions in slots stay in memory."""
    pages = deployment.worker.slots * _count_pages(model.layout, load.tokens)
    held = pages * get_copy_bytes(model.layout)
    of_rows = -(-held * KEPT_SHARE // (KEPT_SHARE - 1))
    of_rank = of_rows * STATE_SHARE // (STATE_SHARE - 1) if model.state_bytes else of_rows
    return deployment.ranks * of_rank


def get_copy_bytes(layout: PageLayout) -> int:
    """Return the bytes of a page in the memory of a session that recalls: rows, and codes of keys."""
    return layout.page_bytes + code_bytes(layout)


def get_stored_bytes(layout: PageLayout, tokens: int, codec: Codec) -> int:
    """Return the bytes of the pages of so many tokens in files."""
    return _count_pages(layout, tokens) * (HEADER_BYTES + payload_bytes(layout, codec))


def count_states(model: ModelSizes, tokens: int) -> int:
    """Count the recurrent states that a session of so many tokens keeps at most."""
    interval = -(-model.state_bytes // model.layout.token_bytes)
    return min(_count_pages(model.layout, tokens), _LEAST_STATES + tokens // interval)


def _get_state_bytes(model: ModelSizes) -> int:
    return HEADER_BYTES + payload_bytes(build_state_layout(model.state_bytes, ""), Codec.RAW)


def _count_pages(layout: PageLayout, tokens: int) -> int:
    """Count whole pages: the tokens behind them have no stored rows."""
    return tokens // layout.page_tokens
