"""Names of pages: of rows as they are appended, and of a prompt whose rows may be stored already."""

from collections.abc import Sequence

from kvrecall.domain.page_ids import PageId, PageNames, split_ids
from kvstore.store import RowStore
from workers.engine.session import WorkerSession
from workers.errors import MalformedMessage
from workers.parallel.alone import Alone
from workers.parallel.group import Group


def read_ids(joined: bytes) -> tuple[PageId, ...]:
    """Split the page ids of a message. Raises MalformedMessage."""
    try:
        return split_ids(joined)
    except ValueError as error:
        raise MalformedMessage(f"page ids: {error}") from error


def get_names(store: RowStore, row_key: bytes) -> PageNames:
    """Return the names of a tenant's pages in this store."""
    return PageNames(row_key, store.row_layout, store.layout.page_tokens)


def name_tokens(names: PageNames, token_ids: Sequence[int]) -> list[PageId]:
    """Name the whole pages of a new session's first tokens, of rows as a full cache has them."""
    whole = len(token_ids) - len(token_ids) % names.page_tokens
    return list(names.extend(None, token_ids[:whole]))


def name_appended(
    store: RowStore, session: WorkerSession, token_ids: Sequence[int], group: Group = Alone()
) -> list[PageId]:
    """Name the pages that the rows of `token_ids` fill, and add them to the session's.

    Rows are exact up to the session's first inexact one. Pages behind that get random ids, the same on
    all ranks of a group.
    """
    page_tokens = store.layout.page_tokens
    tokens = [*session.unnamed, *token_ids]
    whole = len(tokens) - len(tokens) % page_tokens
    session.unnamed = tokens[whole:]
    if not whole:
        return []
    exact = whole
    if session.inexact_from is not None:
        named = len(session.page_ids) * page_tokens
        exact = max(0, min(whole, session.inexact_from - named)) // page_tokens * page_tokens
    names = get_names(store, session.config.row_key)
    before = len(session.page_ids)
    for part, is_exact in ((tokens[:exact], True), (tokens[exact:whole], False)):
        last = session.page_ids[-1] if session.page_ids else None
        session.page_ids += names.extend(last, part, exact=is_exact)
    session.page_ids[before:] = group.lead(session.page_ids[before:])
    return session.page_ids[before:]
