"""Which pages there are: queued in this process, or in a tier."""

from collections.abc import Iterable
from contextlib import suppress

from kvstore.errors import TierError
from kvstore.format.page import PageId
from kvstore.sessions.context import StoreContext
from kvstore.sessions.state import StoredSession


def find_absent(context: StoreContext, ids: Iterable[PageId], *, ask: bool = False) -> set[PageId]:
    """Find those of the pages that neither this process nor a tier has.

    `ask`: as of `TierStack.find`, whose errors this raises.
    """
    # Queued ones first: when they leave the queue, the tiers have them.
    unknown = [page_id for page_id in ids if context.writer.get_queued(page_id) is None]
    return set(unknown) - context.stack.find(unknown, ask=ask)


def find_restored(context: StoreContext, state: StoredSession) -> None:
    """Look again for a session's missing pages: another one that has them too may have restored them."""
    if state.missing:
        with suppress(TierError):
            state.missing = find_absent(context, state.missing)
