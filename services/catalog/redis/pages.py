"""Pages that sessions have, and dead ones, in the Redis catalog."""

from collections.abc import Sequence

from kvrecall.domain.page_ids import PageId
from services.cancellation import run_to_completion
from services.catalog.redis.deletion import SessionDeletion
from services.catalog.redis.indexes.page_tree import RedisPageTree


class RedisPages:
    """Pages that no session has, and which of some are such. Raises CatalogError."""

    def __init__(self, tree: RedisPageTree, deletion: SessionDeletion) -> None:
        self._tree = tree
        self._deletion = deletion

    async def drop_abandoned(self, older_than_seconds: float) -> None:
        """See `services.catalog.base`."""
        await run_to_completion(self._tree.drop_abandoned(older_than_seconds))

    async def get_dead(self, limit: int) -> list[PageId]:
        """Return up to `limit` dead pages, oldest first, after deletions that crashes left are finished."""
        await run_to_completion(self._deletion.finish_some())
        return await self._tree.get_dead(limit)

    async def count_dead(self) -> int:
        """Return the number of dead pages."""
        return await self._tree.count_dead()

    async def confirm_deleted(self, ids: Sequence[PageId]) -> None:
        """Forget dead pages."""
        await run_to_completion(self._tree.forget_dead(ids))

    async def find_live(self, ids: Sequence[PageId]) -> list[PageId]:
        """Return those of these pages that some session has."""
        return await self._tree.find(ids, unknown=False)

    async def find_unknown(self, ids: Sequence[PageId]) -> list[PageId]:
        """Return those of these pages that no session has and that are not dead."""
        return await self._tree.find(ids, unknown=True)
