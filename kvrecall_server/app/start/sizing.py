"""Sizes of a deployment: memory and disk for so many sessions of a model."""

from collections.abc import Iterator
from dataclasses import dataclass

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
        codec: Codec of pages in the lowest tier.
        ranks: Of each worker; the sizes of the model are those of one.
    """

    sessions: int
    tokens: int
    shared: int
    codec: Codec
    ranks: int = 1


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


def list_needs(model: ModelSizes, settings: WorkerSettings, load: Load) -> Iterator[Need]:
    """List what a worker with these settings takes, and what all stored sessions take."""
    ranks, slots = load.ranks, settings.slots
    device = "device of each worker" if ranks == 1 else "devices of each worker's ranks, evenly"
    yield Need("weights", ranks, model.weight_bytes, ranks * model.weight_bytes, device)
    side_bytes = model.get_side_bytes(settings.longest_pass)
    shape = RowShape.of(model.shape, model.shape.n_layers, model.dtype, side_bytes)
    pool = ranks * get_pool_bytes(shape, settings)
    yield Need("active rows of a slot", slots, pool // slots, pool, device)
    copy = ranks * _count_pages(model.layout, load.tokens) * get_copy_bytes(model.layout)
    yield Need("rows of a session in a slot", slots, copy, slots * copy, "memory of each worker")
    shared = ranks * get_stored_bytes(model.layout, load.shared, load.codec)
    own = ranks * get_stored_bytes(model.layout, load.tokens, load.codec) - shared
    stored = load.sessions * own + shared
    yield Need("stored rows of a session", load.sessions, own, stored, "files, or Redis")
    if model.state_bytes:
        each = ranks * count_states(model, load.tokens) * _get_state_bytes(model)
        total = load.sessions * each
        yield Need("stored states of a session", load.sessions, each, total, "files, or Redis")


def get_ram_setting(model: ModelSizes, settings: WorkerSettings, load: Load) -> int:
    """Return the bytes of `--ram` with which the rows of all sessions in slots stay in memory."""
    pages = settings.slots * _count_pages(model.layout, load.tokens)
    held = pages * get_copy_bytes(model.layout)
    of_rows = -(-held * KEPT_SHARE // (KEPT_SHARE - 1))
    of_rank = of_rows * STATE_SHARE // (STATE_SHARE - 1) if model.state_bytes else of_rows
    return load.ranks * of_rank


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
