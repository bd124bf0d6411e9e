"""Responses that clients read again by id, and go on from, and the claims on their answers.

Each tenant has its own responses.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

from kvrecall.domain.errors import LimitExceeded, ServiceError, SessionBusy, UnknownSession
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.sessions.session import Turn
from services.access.quotas import Quotas
from services.catalog.base import Catalog
from services.catalog.responses import StoredConversations, StoredResponse
from services.conversations.histories import extend
from services.streams.turn import ProgressStream, TurnProgress

_RENEWALS_PER_CLAIM = 3
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.2
_DAY_SECONDS = 86_400.0


class AnswerClaim:
    """The right to compute the answer of a response or of a conversation, kept until it is released.

    It puts a conversation's answers in order. Should it be lost to another process, answers are
    added in the order in which they end, and none is lost.
    """

    def __init__(self, store: StoredConversations, id: str, seconds: float) -> None:
        self._store = store
        self._id = id
        self._seconds = seconds
        self._holder = secrets.token_hex(8)
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(self, patience: float) -> None:
        """Wait for up to `patience` seconds. Raises SessionBusy."""
        until = time.monotonic() + patience
        pause = _FIRST_PAUSE_SECONDS
        while not await self._claim():
            if time.monotonic() + pause > until:
                raise SessionBusy(f"{self._id!r} is in the middle of an answer; try again later")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._renewing = asyncio.create_task(self._renew(), name="answer claim")

    async def release(self) -> None:
        """Let the next answer begin."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.wait({self._renewing})
        self._renewing = None
        try:
            await self._store.release(self._id, self._holder)
        except ServiceError:
            return  # it expires soon

    async def _claim(self) -> bool:
        return await self._store.claim(self._id, self._holder, self._seconds)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / _RENEWALS_PER_CLAIM)
            try:
                await self._claim()
            except ServiceError:
                continue  # the catalog is unreachable


class ResponseStore:
    """Stored responses, and the turns that lead to them. Raises UnknownResponse.

    Another tenant's response is unknown.
    """

    def __init__(self, catalog: Catalog, quotas: Quotas, limits: ServiceLimits) -> None:
        self._catalog = catalog
        self._quotas = quotas
        self._claim_seconds = limits.claim_seconds
        self._seconds = limits.response_days * _DAY_SECONDS

    async def store(self, response: StoredResponse) -> None:
        """Store a response for `response_days`. Raises QuotaExceeded."""
        await self._quotas.keep_within(
            response.tenant,
            lambda limits: self._catalog.responses.store(response, self._seconds, limits),
            keep=response.session,
        )

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a response."""
        return await self._catalog.responses.get(response_id, tenant)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response; others that go on from it stay."""
        await self._catalog.responses.delete(response_id, tenant)

    def claim(self, response_id: str) -> AnswerClaim:
        """Return the claim of the process that computes the response; free if none does."""
        claims = self._catalog.conversations
        return AnswerClaim(claims, response_id, self._claim_seconds)

    async def find_committed(self, response: StoredResponse) -> tuple[TurnOutcome, str] | None:
        """Return the outcome of the turn of a response in progress; None unless it was committed.

        With it comes the digest of the conversation with the answer; the `history` of the response
        is still that of the conversation up to the answer.
        """
        for turn in await self.get_turns(response, response.turn - 1, 1):
            if turn.outcome.message is not None:
                digest = extend(bytes.fromhex(response.history), turn.outcome.message).hex()
                entries = await self._catalog.histories.find([digest])
                if any(
                    (each.session, each.turn) == (turn.session, turn.number) for each in entries
                ):
                    return turn.outcome, digest
        return None

    async def get_turns(self, response: StoredResponse, after: int, limit: int) -> list[Turn]:
        """Return turns that led to the response, its own last, in order."""
        turns = await self._catalog.turns.get_after(response.session, after, limit)
        return [turn for turn in turns if turn.number <= response.turn]


async def read_messages(
    catalog: Catalog, limits: ServiceLimits, session: str, last: int, after: int = 0
) -> list[Message]:
    """Return the messages of a session's turns after turn `after` up to turn `last`.

    No more turns are read at once than the bound of a conversation has room for. Raises
    UnknownSession when they are gone, and LimitExceeded when the messages are over it.
    """
    messages: list[Message] = []
    room = limits.max_conversation_bytes
    while after < last:
        count = min(max(1, room // limits.max_turn_bytes), last - after)
        turns = await catalog.turns.get_after(session, after, count)
        if len(turns) < count:
            raise UnknownSession(session)
        for turn in turns:
            reply = turn.outcome.message
            messages += turn.messages if reply is None else (*turn.messages, reply)
        after += count
        room = limits.max_conversation_bytes - sum(message.size for message in messages)
        if room < 0:
            most = limits.max_conversation_bytes
            message = f"the conversation of session {session!r} has more than {most} bytes"
            raise LimitExceeded("kvrecall.session", message, most)
    return messages


class RecordedStream:
    """A turn's stream that passes on the turn's end when `record` has stored what came of it.

    So what a client has seen the end of is found by its next request, whichever process is killed in
    between.
    `observe` is called with each piece before it, and `close` when the stream is closed.
    """

    def __init__(
        self,
        stream: ProgressStream,
        record: Callable[[TurnOutcome], Awaitable[None]],
        close: Callable[[], Awaitable[None]],
        observe: Callable[[TurnProgress], object] | None = None,
    ) -> None:
        self._stream = stream
        self._record = record
        self._close = close
        self._observe = observe
        self._recording: asyncio.Future[None] | None = None

    def __aiter__(self) -> "RecordedStream":
        return self

    async def __anext__(self) -> TurnProgress:
        progress = await anext(self._stream)
        if isinstance(progress, TurnFinished):
            self._recording = asyncio.ensure_future(self._record(progress.outcome))
            await asyncio.shield(self._recording)
        elif self._observe is not None:
            self._observe(progress)
        return progress

    async def aclose(self) -> None:
        """Cancel the turn unless it is committed; return when what came of it is stored."""
        try:
            await self._stream.aclose()
            if self._recording is not None:
                await asyncio.wait({self._recording})
        finally:
            await self._close()
