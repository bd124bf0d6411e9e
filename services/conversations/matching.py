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

from kvrecall.domain.errors import (
    InvalidRequest,
    SessionBusy,
    UnknownResponse,
    UnknownSession,
)
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.session import Session
from kvrecall.domain.session_request import CreateSession
from kvrecall.domain.turn_request import TurnRequest, check_message, check_size
from kvrecall.domain.worker_info import WorkerInfo
from services.catalog.base import Catalog
from services.catalog.records import HistoryEntry, IdempotencyKey
from services.catalog.responses.base import StoredResponse
from services.conversations.histories import (
    History,
    begin,
    build_history,
    canonical_json,
    extend,
    rename_calls,
)
from services.forks import ForkRequest
from services.planning.constraints import check_constraint
from services.turn_stream import ProgressStream, TurnStarted, TurnStream

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
    settings is continued. `turn` has the sampling; its messages are not read. `opening` comes
    before everything else. `follows`: the response whose conversation, without its own opening,
    comes before `messages`.
    """

    messages: tuple[Message, ...]
    settings: CreateSession
    turn: TurnRequest
    key: IdempotencyKey | None = None
    opening: tuple[Message, ...] = ()
    follows: StoredResponse | None = None


@dataclass(frozen=True)
class ReplyPlace:
    """The place of a reply: that of turn `turn` in `session`.

    `asked` is the digest of the conversation up to it.
    """

    session: str
    turn: int
    asked: bytes


@dataclass(frozen=True)
class Continuation:
    """The accepted turn: its stream, and how its session was found.

    `held_tokens` of the conversation were in the session before; None for a repeated request.
    `opening` is the digest of what comes before the conversation's first message, `asked` that of
    the conversation up to the answer.
    """

    stream: ProgressStream
    session: str
    turn: int
    match: Match
    held_tokens: int | None
    opening: bytes
    asked: bytes

    @property
    def place(self) -> ReplyPlace:
        """The place of the answer, from which `Conversations.follow` goes on."""
        return ReplyPlace(self.session, self.turn, self.asked)

    def history(self, answer: Message) -> bytes:
        """Return the digest of the conversation with the answer."""
        return extend(self.asked, answer)


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
        _check_messages(conversation)
        await self._check_answer(conversation.turn, conversation.settings.tools)
        opening, history = await self._read(conversation)
        async for number, entry in self._find(history, conversation.follows):
            try:
                session = await self._catalog.sessions.get(
                    entry.session, conversation.settings.tenant
                )
            except UnknownSession:
                continue  # deleted since
            found = await self._continue(conversation, history, number, entry, session)
            break
        else:
            found = await self._build(conversation, history)
        return replace(found, opening=opening)

    async def follow(self, place: ReplyPlace, conversation: Conversation) -> Continuation:
        """Start the turn of a conversation of which a session holds all up to a reply.

        Its messages are those after the reply; of its settings only the tenant counts. A reply that
        was followed before is followed in a fork. Raises UnknownSession for a place that no session
        of the tenant has, and otherwise as `turn`.
        """
        _check_messages(conversation)
        reply = await self._read_reply(place, conversation.settings.tenant)
        start = extend(place.asked, reply)
        history = build_history(start, conversation.messages, reply.tool_calls)
        for entry in await self._catalog.histories.find([start.hex()]):
            session = await self._get_own(entry.session, conversation.settings.tenant)
            await self._check_answer(conversation.turn, session.settings.tools)
            return await self._continue(conversation, history, 0, entry, session)
        raise UnknownSession(place.session)

    async def _check_answer(self, turn: TurnRequest, tools: Sequence[str]) -> None:
        """Raise InvalidRequest if an answer with these tools cannot be what the turn asks for."""
        if turn.sampling is not None:
            can_call = bool(self._api.info.call_format)
            await check_constraint(turn.sampling.constraint, tools, can_call)

    async def _read_reply(self, place: ReplyPlace, tenant: str) -> Message:
        session = await self._get_own(place.session, tenant)
        for turn in await self._catalog.turns.get_after(session.id, place.turn - 1, 1):
            if turn.number == place.turn and turn.outcome.message is not None:
                return turn.outcome.message
        raise UnknownSession(place.session)

    async def _get_own(self, session_id: str, tenant: str) -> Session:
        """Return the session. Raises UnknownSession, also for another tenant's."""
        session = await self._catalog.sessions.get(session_id)
        if session.settings.tenant != tenant:
            raise UnknownSession(session_id)
        return session

    async def _read(self, conversation: Conversation) -> tuple[bytes, History]:
        """Return the digest of the opening, and the history as far as it must be known.

        That of a response is known by its digest if both have the same opening; if not, it is read
        from the turn log. Raises UnknownResponse when the log is gone.
        """
        scope = begin(self._scope(conversation.settings))
        opening = build_history(scope, conversation.opening).digests[-1]
        follows = conversation.follows
        said: list[Message] = []
        if follows is not None:
            if follows.opening == opening.hex():
                reply = (await self._read_said(follows, follows.turn - 1))[-1]
                start = bytes.fromhex(follows.history)
                return opening, build_history(start, conversation.messages, reply.tool_calls)
            said = await self.read(follows)
        before = (*conversation.opening, *said)
        messages = (*before, *conversation.messages)
        return opening, build_history(scope, messages, hidden=len(before))

    async def read(self, response: StoredResponse) -> list[Message]:
        """Return the conversation up to a response, without its opening. Raises UnknownResponse."""
        return (await self._read_said(response, 0))[response.hidden :]

    async def _read_said(self, response: StoredResponse, after: int) -> list[Message]:
        """Return the messages of the turns from `after` up to the response. Raises UnknownResponse."""
        count = response.turn - after
        turns = await self._catalog.turns.get_after(response.session, after, count)
        if len(turns) < count:
            raise UnknownResponse(response.id)
        replies = [(*turn.messages, turn.outcome.message) for turn in turns]
        return [message for turn in replies for message in turn if message is not None]

    async def _find(
        self, history: History, follows: StoredResponse | None
    ) -> AsyncIterator[tuple[int, HistoryEntry]]:
        """Yield the known parts of the history, the longest first, with their messages' numbers."""
        ends = history.ends
        places = [*ends[:_LAST_PLACES], *ends[_LAST_PLACES:][-_FIRST_PLACES:]]
        numbers = {history.digests[number].hex(): number for number in places}
        if numbers:
            for entry in await self._catalog.histories.find(list(numbers)):
                yield numbers[entry.digest], entry
        if follows is not None and history.start.hex() == follows.history:
            yield 0, HistoryEntry(follows.history, follows.session, follows.turn)
            raise UnknownResponse(follows.id)  # its session was deleted just now

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
            started = await anext(stream)
        except BaseException:
            await stream.aclose()
            raise
        assert isinstance(started, TurnStarted), "a turn begins with its acceptance"
        held = None if match == "repeated" else session.memory.length
        return Continuation(stream, session.id, started.turn, match, held, b"", request.history)

    def _scope(self, settings: CreateSession) -> bytes:
        """Return everything but the messages that the tokens of a conversation depend on.

        The catalog's id is random: without it no digest can be computed.
        """
        fields = asdict(replace(settings, metadata=None, model=None, repair_on=frozenset()))
        del fields["expires_after_seconds"], fields["stored"]
        fields["repair_on"] = sorted(settings.repair_on)
        fields["tools"] = sorted(canonical_json(tool) for tool in settings.tools)
        scope = [self._catalog.id, self._api.info.fingerprint, fields]
        return json.dumps(scope, sort_keys=True).encode()


def _check_messages(conversation: Conversation) -> None:
    """Check each message by itself. Raises InvalidRequest."""
    if not conversation.messages:
        raise InvalidRequest("messages", "a conversation has at least one message")
    for index, message in enumerate(conversation.messages):
        check_message(message, f"messages[{index}]")


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
