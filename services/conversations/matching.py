"""Sessions behind requests that repeat the whole conversation.

The history's digests find the session that holds the longest part of it. Where that is its last
turn, the session goes on; where another turn has followed, or one runs now, a fork does. What no
session holds is appended to a new one, turn by turn, so that an edited history finds it again.
"""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal, Protocol

from kvrecall.domain.errors import InvalidRequest, SessionBusy, UnknownSession
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.session import Session
from kvrecall.domain.session_request import CreateSession
from kvrecall.domain.turn_request import TurnRequest, check_message, check_size
from kvrecall.domain.worker_info import WorkerInfo
from services.catalog.base import Catalog
from services.catalog.records import HistoryEntry, IdempotencyKey
from services.conversations.histories import History, build_history, rename_calls
from services.forks import ForkRequest
from services.turn_stream import TurnStream

Match = Literal["continued", "forked", "built", "repeated"]
# Places of a history that are looked up: its last ones, and of the others the first ones.
_LAST_PLACES = 512
_FIRST_PLACES = 64


class SessionApi(Protocol):
    """What of the service a conversation is made of."""

    @property
    def info(self) -> WorkerInfo:
        """Model, shape and limits of the worker."""
        ...

    @property
    def limits(self) -> ServiceLimits:
        """Limits and defaults that the operator chose."""
        ...

    async def create(self, request: CreateSession, key: IdempotencyKey | None = None) -> Session:
        """Open a session."""
        ...

    async def fork(
        self, session: str, request: ForkRequest, key: IdempotencyKey | None = None
    ) -> Session:
        """Create a session that begins at the end of another's turn."""
        ...

    def turn(
        self,
        session: str,
        request: TurnRequest,
        key: IdempotencyKey | None = None,
        tenant: str | None = None,
    ) -> TurnStream:
        """Start a turn."""
        ...


@dataclass(frozen=True)
class Conversation:
    """A whole conversation, and the turn that its last messages ask for.

    `settings` are those of the session that it begins if none holds it; only a session of the same
    settings is continued. `turn` has the sampling; its messages are not read.
    """

    messages: tuple[Message, ...]
    settings: CreateSession
    turn: TurnRequest
    key: IdempotencyKey | None = None


@dataclass(frozen=True)
class Continuation:
    """The accepted turn: its stream, and how its session was found.

    `held_tokens` of the conversation were in the session before; None for a repeated request.
    """

    stream: TurnStream
    session: str
    match: Match
    held_tokens: int | None


class Conversations:
    """Finds, forks or builds the session of a conversation and starts its turn."""

    def __init__(self, catalog: Catalog, api: SessionApi) -> None:
        self._catalog = catalog
        self._api = api

    async def turn(self, conversation: Conversation) -> Continuation:
        """Start the turn and return when it was accepted.

        Raises ToolResultWithoutCall, CallsOutstanding and DuplicateCall for a history that no
        session can have, and what the creation of a session, a fork and a turn raise. What can be
        refused by the messages alone is refused before any session is forked or created.
        """
        if not conversation.messages:
            raise InvalidRequest("messages", "a conversation has at least one message")
        for index, message in enumerate(conversation.messages):
            check_message(message, f"messages[{index}]")
        history = build_history(self._scope(conversation.settings), conversation.messages)
        async for number, entry in self._find(history):
            try:
                session = await self._catalog.sessions.get(
                    entry.session, conversation.settings.tenant
                )
            except UnknownSession:
                continue  # deleted since
            return await self._continue(conversation, history, number, entry, session)
        return await self._build(conversation, history)

    async def _find(self, history: History) -> AsyncIterator[tuple[int, HistoryEntry]]:
        """Yield the known parts of the history, the longest first, with their messages' numbers."""
        ends = history.ends
        places = [*ends[:_LAST_PLACES], *ends[_LAST_PLACES:][-_FIRST_PLACES:]]
        numbers = {history.digests[number].hex(): number for number in places}
        if numbers:
            for entry in await self._catalog.histories.find(list(numbers)):
                yield numbers[entry.digest], entry

    async def _continue(
        self,
        conversation: Conversation,
        history: History,
        number: int,
        entry: HistoryEntry,
        session: Session,
    ) -> Continuation:
        """Go on with the session behind message `number`, or with a fork of it."""
        check_size(history.messages[number:], self._api.limits)
        request = replace(
            conversation.turn,
            messages=history.messages[number:],
            history=history.digests[-1],
            follows=entry.turn,
        )
        key = _derive(conversation.key, "turn", session.id)
        if key is not None and await self._catalog.idempotency.get(key) is not None:
            return await self._begin(session, request, key, "repeated")
        if session.turns == entry.turn:
            with suppress(SessionBusy):  # another branch of the conversation came first
                return await self._begin(session, request, key, "continued")
        fork = await self._api.fork(
            session.id,
            ForkRequest(entry.turn, queue=True),
            _derive(conversation.key, "fork", session.id),
        )
        key = _derive(conversation.key, "turn", fork.id)
        return await self._begin(fork, request, key, "forked")

    async def _build(self, conversation: Conversation, history: History) -> Continuation:
        """Append the history to a new session, one turn up to each answer in it."""
        turns = list(_get_turns(history.messages))
        for start, end in turns:
            check_size(history.messages[start:end], self._api.limits)
        session = await self._api.create(
            replace(conversation.settings, matched=True), _derive(conversation.key, "create", "")
        )
        key = conversation.key
        *before, (first, _) = turns
        for turn, (start, end) in enumerate(before):
            request = TurnRequest(
                history.messages[start:end],
                generate=False,
                history=history.digests[end],
                follows=turn,
            )
            stream = self._api.turn(session.id, request, _derive(key, f"turn {turn}", session.id))
            await _read_to_end(stream)
        request = replace(
            conversation.turn,
            messages=history.messages[first:],
            history=history.digests[-1],
            follows=len(before),
        )
        return await self._begin(session, request, _derive(key, "turn", session.id), "built")

    async def _begin(
        self,
        session: Session,
        request: TurnRequest,
        key: IdempotencyKey | None,
        match: Match,
    ) -> Continuation:
        """Start the turn and wait until it is accepted, so that a refusal is raised here."""
        calls = [call.call for call in session.calls]
        request = replace(request, messages=rename_calls(request.messages, calls))
        stream = self._api.turn(session.id, request, key)
        try:
            await anext(stream)
        except BaseException:
            await stream.aclose()
            raise
        held = None if match == "repeated" else session.memory.length
        return Continuation(stream, session.id, match, held)

    def _scope(self, settings: CreateSession) -> bytes:
        """Return everything but the messages that the tokens of a conversation depend on.

        The catalog's id is random: without it no digest can be computed.
        """
        fields = asdict(replace(settings, metadata=None, model=None, repair_on=frozenset()))
        del fields["expires_after_seconds"]
        fields["repair_on"] = sorted(settings.repair_on)
        fields["tools"] = sorted(settings.tools)
        scope = [self._catalog.id, self._api.info.fingerprint, fields]
        return json.dumps(scope, sort_keys=True).encode()


def _get_turns(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """Cut a history behind its answers; yield the first message and the end of each turn."""
    start = 0
    for number, message in enumerate(messages[:-1], 1):
        if message.role == "assistant":
            yield start, number
            start = number
    yield start, len(messages)


def _derive(key: IdempotencyKey | None, step: str, session: str) -> IdempotencyKey | None:
    """Return the key of one step of a request."""
    if key is None:
        return None
    return replace(key, scope=f"{key.scope} {step}", session=session)


async def _read_to_end(stream: TurnStream) -> None:
    try:
        async for _ in stream:
            pass
    finally:
        await stream.aclose()
