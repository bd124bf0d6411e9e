"""Grouping of pages into calls: one session each, bounded in bytes."""

from collections.abc import Iterator, Sequence

from kvstore.format.page import Blob, PageHeader, PageKey

ParsedPage = tuple[PageKey, PageHeader, Blob]


def group_by_session(keys: Sequence[PageKey]) -> list[tuple[str, list[PageKey]]]:
    """Group page keys by session, in their order."""
    by_session: dict[str, list[PageKey]] = {}
    for key in keys:
        by_session.setdefault(key.session, []).append(key)
    return list(by_session.items())


def split_into_batches(
    pages: Sequence[ParsedPage], batch_bytes: int
) -> Iterator[tuple[str, list[ParsedPage]]]:
    """Split pages into batches of one session and at most `batch_bytes`, unless a page is larger.

    Keeps the order of a session's pages.
    """
    by_session: dict[str, list[ParsedPage]] = {}
    for page in pages:
        session = page[0].session
        batch = by_session.setdefault(session, [])
        if batch and sum(len(blob) for _, _, blob in batch) + len(page[2]) > batch_bytes:
            yield session, batch
            batch = by_session[session] = []
        batch.append(page)
    yield from by_session.items()
