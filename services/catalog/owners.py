"""The tenants that own sessions and conversations."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable

_OWNERS_KNOWN = 10_000


class Owners:
    """The tenants of sessions, or of conversations, of those used last: they never change."""

    def __init__(self, read: Callable[[str], Awaitable[str | None]]) -> None:
        self._read = read
        self._known: OrderedDict[str, str] = OrderedDict()

    async def find(self, name: str) -> str | None:
        """Return the tenant of a session or conversation, None if there is none. Raises CatalogError."""
        found = self._known.pop(name, None)
        if found is None:
            found = await self._read(name)
        if found is not None:
            self._known[name] = found
            if len(self._known) > _OWNERS_KNOWN:
                self._known.popitem(last=False)
        return found

    def forget(self, name: str) -> None:
        """Forget what is deleted: its name may come again."""
        self._known.pop(name, None)
