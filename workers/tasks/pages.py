"""Pages of all sessions: those that a worker stores, and the deletion of some.

Each rank has a store of its own, and a page that another one lacks where a crash came between their writes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrecall.domain.page_ids import ID_BYTES, PageId, join_ids, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.errors import MalformedMessage
from workers.generation.steps import Steps, wait_alike
from workers.parallel.group import Group

# Of a rank in one exchange: a million pages take a hundred, each of which lasts milliseconds, and between
# two of them other jobs go on.
_BYTES_EXCHANGED = 10_000 * ID_BYTES


@dataclass(frozen=True)
class PageSet:
    """Ids of pages; of one of several ranks also sorted and joined: a million takes a second, off the thread."""

    ids: set[PageId]
    joined: bytes

    @classmethod
    def of(cls, ids: Iterable[PageId], group: Group) -> "PageSet":
        """Sort and join some ids, where there are other ranks to tell."""
        distinct = set(ids)
        return cls(distinct, join_ids(sorted(distinct)) if group.count > 1 else b"")


def read_age(request: pb.ListPagesRequest) -> float:
    """Return the age in seconds from which on pages are listed. Raises MalformedMessage."""
    if not math.isfinite(request.older_than_seconds):
        raise MalformedMessage(
            f"older_than_seconds must be a number of seconds, got {request.older_than_seconds}"
        )
    return request.older_than_seconds


def run_list_pages(engine: Engine, older_than_seconds: float) -> Steps[set[PageId]]:
    """List the pages that this worker alone stores: those that some rank has. Raises StorageFailed."""

    def read() -> PageSet:
        return PageSet.of(engine.stored.list_pages(older_than_seconds), engine.group)

    listed = yield from wait_alike(engine, engine.store_io.submit(read))
    return (yield from unite_ids(engine.group, listed))


def run_delete_pages(engine: Engine, pages: Sequence[PageId]) -> Steps[int]:
    """Delete pages that no session has any more; counts those that some rank had. Raises StorageFailed."""
    deleted = yield from wait_alike(engine, engine.delete_pages(pages))
    return len((yield from unite_ids(engine.group, PageSet.of(deleted, engine.group))))


def unite_ids(group: Group, own: PageSet) -> Steps[set[PageId]]:
    """Unite the ranks' ids, a part of them at a time. Nearly always they are the same."""
    more = set[PageId]()
    most = max(group.gather(len(own.joined)))
    for first in range(0, most, _BYTES_EXCHANGED):
        part = own.joined[first : first + _BYTES_EXCHANGED]
        for other in group.gather(part):
            if other != part:
                more.update(split_ids(other))
        yield None
    return own.ids | more if more else own.ids
