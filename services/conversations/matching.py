"""Sessions behind requests that repeat the whole conversation.

The history's digests find the session that holds the longest part of it. Where that is its last
turn, the session goes on; where another turn has followed, or one runs now, a fork does. What no
session holds is appended to a new one, in few turns, so that an edited history finds it again.
"""

import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TypeVar

from kvrecall.domain.errors import (
    InvalidRequest,
    LimitExceeded,
    ServiceError,
    SessionBusy,
    SessionMismatch,
    UnknownResponse,
    UnknownSession,
)
from kvrecall.domain.events import TurnFinished
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.turn_request import TurnRequest, check_message
from services.cancellation import run_to_completion
from services.catalog.base import Catalog
from services.catalog.records import HistoryEntry
from services.catalog.responses import StoredResponse
from services.conversations.choices import Choices, start_choices
from services.conversations.completions import ALONE_SECONDS, Completions, start_completions
from services.conversations.continuation import (
    Continuation,
    Conversation,
    Direction,
    MatchKind,
    ReplyPlace,
    SessionApi,
)
from services.conversations.histories import (
    History,
    begin,
    build_history,
    canonical_json,
    extend,
)
from services.conversations.mending import mend_messages
from services.conversations.responses import RecordedStream, read_messages
from services.conversations.steps import Match, Place, Steps
from services.grammars import ConstraintChecks, GrammarChecks
from services.streams.turn import ProgressStream, TurnProgress

# Places of a history that are looked up: its last ones, and of the others the first ones.
_LAST_PLACES = 512
_FIRST_PLACES = 64
# Most histories are held up to their last answer or some edit not far before it: a first query asks
# for so many places, each further one for so many times more.
_PLACES_AT_FIRST = 4
_PLACES_FACTOR = 8
# How often a conversation is looked up whose session is deleted while it goes on there.
_LOOK_UPS = 8
Begun = TypeVar("Begun")


class Conversations:
    """Finds, forks or builds the session of a conversation and starts its turn."""

    def __init__(self, catalog: Catalog, api: SessionApi, grammars: GrammarChecks) -> None:
        self._catalog = catalog
        self._api = api
        self._constraints = ConstraintChecks(grammars)

    @property
    def _mends(self) -> bool:
        return self._api.limits.mends

    async def start(self, conversation: Conversation, direction: Direction) -> Continuation:
        """Start the turn where the client directs it. Raises as the methods for each direction."""
        if direction.session:
            return await self.turn_in(direction.session, conversation, direction.only_new)
        if direction.alone:
            return await self.turn_alone(conversation)
        return await self.turn(conversation)

    async def turn(self, conversation: Conversation) -> Continuation:
        """Start the turn and return when it was accepted.

        Raises ToolResultWithoutCall, CallsOutstanding and DuplicateCall for a history that no
        session can have, and what the creation of a session, a fork and a turn raise. What can be
        refused by the messages alone is refused before any session is forked or created.
        """
        conversation = self._check_messages(conversation)

        async def begin_at(steps: Steps, match: Match) -> Continuation:
            place = match.place
            going = self._build(steps) if place is None else self._continue(steps, place)
            return replace(await going, opening=match.opening)

        return await self._go_on(conversation, begin_at)

    async def choices(self, conversation: Conversation, count: int) -> Choices:
        """Start `count` turns for as many answers, each in a session of its own.

        They go on from the session that holds the conversation, which stays as it is. Raises as
        `turn`; then none of them runs.
        """
        conversation = self._check_messages(conversation)

        async def begin_at(steps: Steps, match: Match) -> Choices:
            return await start_choices(steps, match.place, count)

        return await self._go_on(conversation, begin_at)

    async def completions(
        self, settings: CreateSession, turns: Sequence[TurnRequest]
    ) -> Completions:
        """Start completions of plain prompts. Raises as `start_completions`."""
        for turn in turns:
            await self._check_answer(turn, (), settings.tenant)
        return await start_completions(self._api, settings, turns)

    async def turn_in(
        self, session_id: str, conversation: Conversation, only_new: bool
    ) -> Continuation:
        """Start the turn in a session that the client names, after what it holds.

        Of the settings only tenant, tools and salt count, the last two where they are given. Raises
        UnknownSession, SessionMismatch, SessionBusy when another turn came first, and otherwise as
        `turn`.
        """
        conversation = self._check_messages(conversation)
        session = await self._catalog.sessions.get(session_id, conversation.settings.tenant)
        if conversation.settings.cache_salt:
            _require_salt(session, conversation.settings.cache_salt)
        place = Place(session, session.turns, 0)
        conversation = replace(conversation, turn=replace(conversation.turn, queue=True))
        steps = Steps(self._api, conversation, History(begin(b""), ()))
        if await self._is_repeated(steps, place):
            return await steps.begin(place, "repeated")
        own = session.settings
        await self._check_answer(conversation.turn, own.tools, own.tenant)
        new = await _read_new(self._catalog, self._api.limits, session, conversation, only_new)
        steps = Steps(self._api, conversation, new)
        steps.check(0)
        return replace(await steps.begin(place, "continued"), opening=new.start)

    async def turn_alone(self, conversation: Conversation) -> Continuation:
        """Start the turn in a new session that no other request finds. Raises as `turn`.

        It is deleted behind the answer, so a repeated request is answered anew.
        """
        conversation = self._check_messages(conversation)
        settings = replace(conversation.settings, expires_after_seconds=ALONE_SECONDS)
        conversation = replace(conversation, settings=settings, key=None)
        await self._check_answer(conversation.turn, settings.tools, settings.tenant)
        opening = conversation.opening
        start = begin(secrets.token_bytes(32))
        messages = (*opening, *conversation.messages)
        history = build_history(start, messages, hidden=len(opening), mend=self._mends)
        found = await self._build(Steps(self._api, conversation, history))

        async def delete() -> None:
            with suppress(ServiceError):
                await self._api.delete(found.session)

        stream = RecordedStream(found.stream, _record_nothing, delete)
        return replace(found, stream=stream, opening=start)

    async def follow(self, place: ReplyPlace, conversation: Conversation) -> Continuation:
        """Continue a session after the reply at `place`.

        `conversation` has only the messages that follow it; of its settings only tenant and salt
        count. A reply that was followed before is followed in a fork. Raises UnknownSession for a
        place that no session of the tenant has, SessionMismatch for one with another salt, and
        otherwise as `turn`.
        """
        conversation = self._check_messages(conversation)
        reply = await self._read_reply(place, conversation.settings.tenant)
        start = extend(place.asked, reply)
        calls = reply.tool_calls
        history = build_history(start, conversation.messages, calls, mend=self._mends)
        for entry in await self._catalog.histories.find([start.hex()]):
            session = await self._catalog.sessions.get(entry.session, conversation.settings.tenant)
            own = session.settings
            _require_salt(session, conversation.settings.cache_salt)
            await self._check_answer(conversation.turn, own.tools, own.tenant)
            steps = Steps(self._api, conversation, history)
            return await self._continue(steps, Place(session, entry.turn, 0))
        raise UnknownSession(place.session)

    async def _go_on(
        self,
        conversation: Conversation,
        begin_at: Callable[[Steps, Match], Awaitable[Begun]],
    ) -> Begun:
        """Begin at the place that holds the longest part of a conversation, or at none.

        A session that is deleted between the look-up and its use is one that holds nothing: the
        look-up and what follows it are repeated. Raises SessionBusy if that has no end, and what
        `begin_at` raises; then nothing has begun.
        """
        gone: set[str] = set()
        for _ in range(_LOOK_UPS):
            match = await self.look_up(conversation, gone)
            try:
                return await begin_at(Steps(self._api, conversation, match.history), match)
            except UnknownSession:
                if match.place is not None:
                    gone.add(match.place.session.id)
        raise SessionBusy(
            f"{_LOOK_UPS} sessions of this conversation were deleted while it was going on in them; "
            "send the request again"
        )

    async def look_up(self, conversation: Conversation, gone: Container[str] = ()) -> Match:
        """Return the longest part of a conversation that a session holds.

        Its messages are checked already. Sessions that are `gone` hold nothing. Raises as `turn`
        does for a history that no session can have.
        """
        own = conversation.settings
        await self._check_answer(conversation.turn, own.tools, own.tenant)
        read = await self._read(conversation)
        async for number, entry in self._find(read.history, conversation.follows):
            if entry.session in gone:
                continue
            with suppress(UnknownSession):  # deleted since
                session = await self._catalog.sessions.get(
                    entry.session, conversation.settings.tenant
                )
                return replace(read, place=Place(session, entry.turn, number))
        return read

    def _check_messages(self, conversation: Conversation) -> Conversation:
        """Check each message by itself, mended where the operator wants it. Raises InvalidRequest."""
        if not conversation.messages:
            raise InvalidRequest("messages", "a conversation has at least one message")
        if self._mends:
            mended = mend_messages(conversation.messages)
            conversation = replace(conversation, messages=mended.messages, ignored=mended.ignored)
        for index, message in enumerate(conversation.messages):
            if not (self._mends and message.role == "tool"):  # its call is found with the others
                check_message(message, f"messages[{index}]")
        return conversation

    async def _check_answer(self, turn: TurnRequest, tools: Sequence[str], tenant: str) -> None:
        """Raise InvalidRequest if an answer with these tools cannot be what the turn asks for."""
        if turn.sampling is not None:
            form = self._api.info.call_format
            await self._constraints.check(turn.sampling.constraint, tools, form, tenant)

    async def _read_reply(self, place: ReplyPlace, tenant: str) -> Message:
        session = await self._catalog.sessions.get(place.session, tenant)
        for turn in await self._catalog.turns.get_after(session.id, place.turn - 1, 1):
            if turn.number == place.turn and turn.outcome.message is not None:
                return turn.outcome.message
        raise UnknownSession(place.session)

    async def _read(self, conversation: Conversation) -> Match:
        """Return the conversation's opening and history, without a place.

        That of a response is known by its digest if both have the same opening; if not, it is read
        from the turn log. Raises UnknownResponse when the log is gone, and SessionMismatch for a response
        with another salt.
        """
        scope = begin(self._scope(conversation.settings))
        opening = build_history(scope, conversation.opening).digests[-1]
        follows = conversation.follows
        earlier: list[Message] = []
        if follows is not None:
            digest, _, origin = follows.opening.partition("@")
            known = opening
            if origin:  # it was imported with its session: its digests are the other catalog's
                other = begin(self._scope(conversation.settings, origin))
                known = build_history(other, conversation.opening).digests[-1]
            if digest == known.hex():
                earlier = await self._read_messages(follows, follows.turn - 1)
                calls = earlier[-1].tool_calls
                start = bytes.fromhex(follows.history)
                messages = conversation.messages
                return Match(opening, build_history(start, messages, calls, mend=self._mends))
            earlier = await self.read(follows, conversation.settings.cache_salt)
        before = (*conversation.opening, *earlier)
        messages = (*before, *conversation.messages)
        history = build_history(scope, messages, hidden=len(before), mend=self._mends)
        return Match(opening, history)

    async def read(self, response: StoredResponse, salt: str) -> list[Message]:
        """Return the conversation up to a response, without its opening.

        Raises UnknownResponse, LimitExceeded, and SessionMismatch unless it has the salt.
        """
        try:
            session = await self._catalog.sessions.get(response.session, response.tenant)
        except UnknownSession as error:
            raise UnknownResponse(response.id) from error
        _require_salt(session, salt)
        return (await self._read_messages(response, 0))[response.hidden :]

    async def _read_messages(self, response: StoredResponse, after: int) -> list[Message]:
        """Return the messages of the turns after `after` up to a response. Raises as `read`."""
        limits = self._api.limits
        try:
            return await read_messages(
                self._catalog, limits, response.session, response.turn, after
            )
        except UnknownSession as error:
            raise UnknownResponse(response.id) from error
        except LimitExceeded as error:
            error.details["field"] = "previous_response_id"
            raise

    async def _find(
        self, history: History, follows: StoredResponse | None
    ) -> AsyncIterator[tuple[int, HistoryEntry]]:
        """Yield the known parts of the history, the longest first, with their messages' numbers."""
        ends = history.ends
        places = [*ends[:_LAST_PLACES], *ends[_LAST_PLACES:][-_FIRST_PLACES:]]
        count = _PLACES_AT_FIRST
        while places:
            numbers = {history.digests[number].hex(): number for number in places[:count]}
            for entry in await self._catalog.histories.find(list(numbers)):
                yield numbers[entry.digest], entry
            del places[:count]
            count *= _PLACES_FACTOR
        if follows is not None and history.start.hex() == follows.history:
            yield 0, HistoryEntry(follows.history, follows.session, follows.turn)
            raise UnknownResponse(follows.id)  # its session was deleted just now

    async def _continue(self, steps: Steps, place: Place) -> Continuation:
        """Go on at a place of a session, or in a fork of it."""
        steps.check(place.number)
        if await self._is_repeated(steps, place):
            return await steps.begin(place, "repeated")
        if place.session.turns == place.turn:
            with suppress(SessionBusy):  # another branch of the conversation came first
                return await steps.begin(place, "continued")
        fork = await steps.fork(place)
        return await self._begin_new(steps, fork, "forked")

    async def _is_repeated(self, steps: Steps, place: Place) -> bool:
        """Whether the request has started its turn at the place before."""
        key = steps.derive_key("turn", place.session.id)
        return key is not None and await self._catalog.idempotency.get(key) is not None

    async def _build(self, steps: Steps) -> Continuation:
        """Append the history to a new session, in turns that end on some of its answers."""
        *before, _ = steps.cut()
        if before:
            await steps.check_context()
        place = new = await steps.create()
        try:
            place, appended = await steps.append(new, before)
        except BaseException:
            await run_to_completion(self._api.delete_unused(new.session))
            raise
        return await self._begin_new(steps, place, "built", appended)

    async def _begin_new(
        self, steps: Steps, place: Place, match: MatchKind, appended: int = 0
    ) -> Continuation:
        """Start the turn in a new session, which is deleted if it is refused.

        A session whose turn was accepted is deleted unless the turn is committed, but not that of a
        request with a key, of which a repetition goes on there. One that turns were appended to
        stays: the next request goes on from there.
        """

        async def discard() -> None:
            await self._api.delete_unused(place.session)

        try:
            found = await steps.begin(place, match, appended)
        except BaseException:
            await run_to_completion(discard())
            raise
        if steps.in_background or steps.has_key:
            return found
        return replace(found, stream=NewSessionStream(found.stream, discard))

    def _scope(self, settings: CreateSession, catalog: str = "") -> bytes:
        """Return everything but the messages that the tokens of a conversation depend on, and its salt.

        The id of the catalog (empty: this one) is random: without it no digest can be computed.
        """
        fields = asdict(replace(settings, metadata=None, model=None))
        del fields["expires_after_seconds"], fields["stored"], fields["branch"]
        for name, nothing in (
            ("template_arguments", "{}"),
            ("cache_salt", ""),
            ("remember", ""),
            ("keep_reasoning", False),
        ):
            if fields[name] == nothing:  # as in digests of before there were any
                del fields[name]
        if settings.repair_on is not None:
            fields["repair_on"] = sorted(settings.repair_on)
        fields["tools"] = [canonical_json(tool) for tool in settings.tools]
        scope = [catalog or self._catalog.id, self._api.info.fingerprint, fields]
        return json.dumps(scope, sort_keys=True).encode()


def _require_salt(session: Session, salt: str) -> None:
    """Raise SessionMismatch unless the session has this salt. Neither of the two is shown."""
    if session.settings.cache_salt == salt:
        return
    message = (
        f"session {session.id!r} was created with another cache_salt than this request has; send the "
        "one that it was created with"
        if session.settings.cache_salt
        else f"session {session.id!r} was created without cache_salt; leave it out"
    )
    raise SessionMismatch(message, session=session.id, field="cache_salt")


async def _record_nothing(outcome: TurnOutcome) -> None:
    return None


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


async def _read_new(
    catalog: Catalog,
    limits: ServiceLimits,
    session: Session,
    conversation: Conversation,
    only_new: bool,
) -> History:
    """Return what of a conversation is new to a session that the client names.

    Raises SessionMismatch unless all that the session holds comes before it.
    """
    tools = conversation.settings.tools
    if tools and _canonical(tools) != _canonical(session.settings.tools):
        raise SessionMismatch(f"session {session.id!r} has other tools", session=session.id)
    # A digest of its own: no history of messages alone leads to this session.
    place = begin(json.dumps([catalog.id, session.id, session.turns]).encode())
    messages = (*conversation.opening, *conversation.messages)
    if only_new:
        calls = [call.call for call in session.calls]
        # What is new is the client's own step: a result that is missing is still awaited.
        return build_history(place, messages, calls)
    held = await read_messages(catalog, limits, session.id, session.turns)
    history = build_history(place, messages, mend=limits.mends)
    count = len(held)
    if len(history.messages) <= count or history.digests[count] != _digest(place, held):
        message = (
            f"session {session.id!r} holds {count} messages, which do not all come before others in "
            "this request; send the whole conversation, or with kvrecall-history: new what is new"
        )
        raise SessionMismatch(message, session=session.id)
    return History(history.digests[count], history.messages[count:], history.ignored)


def _digest(start: bytes, held: Sequence[Message]) -> bytes:
    """Return the digest of messages of which the last calls may still wait for results."""
    if not held or held[-1].role != "assistant":
        return build_history(start, held).digests[-1]
    return extend(build_history(start, held[:-1]).digests[-1], held[-1])


def _canonical(tools: Sequence[str]) -> list[str]:
    return sorted(canonical_json(tool) for tool in tools)
