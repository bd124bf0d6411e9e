"""A session's rows in host memory, for retrieval, prompts, repairs and re-selections."""

from collections.abc import Callable, Sequence

from torch import Tensor

from kvrecall.domain.page_ids import PageId
from workers.engine.activation import LayerSource
from workers.engine.engine import Engine
from workers.engine.host.cache import HostCache
from workers.engine.session import ResidentSession
from workers.engine.stored.store_io import map_store_errors
from workers.generation.steps import Steps, wait_for_writes
from workers.retrieval.host_copy import HostCopy

# Pages that are read before others run.
_PAGES_AT_ONCE = 8


class PageTaker:
    """Takes pages of a session for its copy: those that another session has from there, others are read.

    Attributes:
        length: Rows that the session has.
    """

    def __init__(
        self,
        copy: HostCopy,
        cache: HostCache,
        source: LayerSource,
        name: str,
        length: int,
        pin: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda pages: pages,
    ) -> None:
        """Address the first rows of session `name`; the copy keeps pages that have not changed.

        pin: brings pages that were read to where a device reads them. Reads nothing. Raises the errors of the
        source.
        """
        self.length = length
        self._pin = pin
        self._copy = copy
        self._cache = cache
        self._source = source
        self._name = name
        pages = range(-(-length // self._tokens))
        self._ids = source.page_ids(name, pages)
        copy.keep(self._ids, length)

    @property
    def ids(self) -> Sequence[PageId | None]:
        """Ids of all of the session's pages; None for one that may change."""
        return self._ids

    def take(self, stop: int) -> None:
        """Take the pages before position `stop` that are missing. Raises the errors of the source."""
        end = min(len(self._ids), -(-stop // self._tokens))
        wanted = range(self._copy.pages, end)
        if not wanted:
            return
        ids = self._ids[wanted.start : end]
        found = dict(zip(wanted, map(self._cache.get, ids), strict=True))
        missing = [index for index, rows in found.items() if rows is None]
        read = self._pin(self._source.hold_pages(self._name, missing))
        found |= zip(missing, read, strict=True)
        pages = [rows for rows in found.values() if rows is not None]
        self._cache.put(ids, pages)
        self._copy.append(ids, pages, min(self.length, end * self._tokens))

    @property
    def _tokens(self) -> int:
        return self._copy.layout.page_tokens


def open_host_copy(
    engine: Engine, resident: ResidentSession, source: LayerSource | None = None
) -> Steps[tuple[HostCopy, PageTaker] | None]:
    """Wait for the session's writes, and reserve memory for all of its rows.

    The copy has the pages that it had, but for those that may have changed. source: of the rows, the
    engine's store unless given. Returns what takes the others, or None, and the session has no copy,
    where the running jobs leave no memory for this one. Raises the errors of the source.
    """
    session = resident.session
    yield from wait_for_writes(engine, session)
    settings = resident.config.retrieval
    copy = session.host_copy or HostCopy(
        engine.store.layout, settings, engine.native, engine.host_cache.codes
    )
    with map_store_errors():
        source = source or engine.store
        pin = engine.cache.transfers.pin if engine.on_device else list
        taker = PageTaker(copy, engine.host_cache, source, session.name, session.length, pin)
    own_bytes, coded = copy.most_own_bytes(session.length), copy.codes_keys(session.length)
    reserved = engine.host_cache.reserve(session.name, taker.ids, own_bytes, coded=coded)
    kept = engine.group.gather((reserved, copy.pages))
    session.host_copy = copy
    if not all(has_room for has_room, _ in kept):
        engine.drop_host_copy(session)
        return None
    # The ranks take turns with others alike only if all have as much to take.
    if len(set(kept)) > 1:
        copy.keep([], session.length)
    return copy, taker


def fill_host_copy(
    engine: Engine,
    resident: ResidentSession,
    source: LayerSource | None = None,
    *,
    index: bool = True,
) -> Steps[HostCopy | None]:
    """Take all of a session's rows, and index them; yields between reads.

    index: False leaves the rows without an index, for readers of all keys. Returns None, and takes
    `source`, as `open_host_copy`. Raises the errors of the source.
    """
    opened = yield from open_host_copy(engine, resident, source)
    if opened is None:
        return None
    copy, taker = opened
    while copy.rows.length < taker.length:
        with map_store_errors():
            taker.take(copy.rows.length + _PAGES_AT_ONCE * copy.layout.page_tokens)
        yield None
    if index:
        yield from copy.index_rows()
    return copy
