"""Resource that is created by `await` or by `async with`."""

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Any, Generic, TypeVar

Handle = TypeVar("Handle", bound=AbstractAsyncContextManager[Any])


class Opening(Awaitable[Handle], Generic[Handle]):
    """Resource to be created: `await` it for its handle, or use it as a context manager."""

    def __init__(self, create: Callable[[], Awaitable[Handle]]) -> None:
        self._create = create
        self._stack = AsyncExitStack()

    def __await__(self) -> Generator[Any, Any, Handle]:
        return self._create().__await__()

    async def __aenter__(self) -> Handle:
        handle = await self._create()
        await self._stack.enter_async_context(handle)
        return handle

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)
