"""Parts of a store that all of its collaborators use."""

from dataclasses import dataclass

from kvstore.format.page import PageLayout
from kvstore.hierarchy.page_writer import PageWriter
from kvstore.hierarchy.tier_stack import TierStack


@dataclass(frozen=True, eq=False)
class StoreContext:
    """Shared parts of one row store.

    Attributes:
        layout: Shape, dtype and fingerprint of the rows.
        stack: The tiers.
        writer: Queue and thread that write pages to the tiers.
    """

    layout: PageLayout
    stack: TierStack
    writer: PageWriter
