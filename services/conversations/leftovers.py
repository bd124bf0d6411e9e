"""New sessions whose turn failed: deleted, so that no refused or broken request leaves one behind."""

from collections.abc import Awaitable, Callable

from kvrecall.domain.events import TurnFinished
from services.cancellation import run_to_completion
from services.turn_stream import ProgressStream, TurnProgress


class NewSessionStream:
    """The stream of a new session's turn, which calls `discard` unless the turn was read to its end."""

    def __init__(self, stream: ProgressStream, discard: Callable[[], Awaitable[None]]) -> None:
        self._stream = stream
        self._discard = discard
        self._done = False

    def __aiter__(self) -> "NewSessionStream":
        return self

    async def __anext__(self) -> TurnProgress:
        progress = await anext(self._stream)
        self._done = self._done or isinstance(progress, TurnFinished)
        return progress

    async def aclose(self) -> None:
        """Cancel the turn unless it is committed; return when nothing of it is left."""
        await run_to_completion(self._close())

    async def _close(self) -> None:
        await self._stream.aclose()
        if not self._done:
            self._done = True
            await self._discard()
