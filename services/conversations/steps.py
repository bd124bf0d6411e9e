"""The steps of one request: sessions that it creates or forks, turns that it appends and begins.

Each has an idempotency key of its own, so that a request repeated under its key repeats none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import accumulate

from kvrecall.domain.errors import ContextExceeded
from kvrecall.domain.events import TurnFinished, TurnStarted
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.turn_request import TurnRequest, check_size
from services.catalog.records import IdempotencyKey
from services.conversations.continuation import Continuation, Conversation, MatchKind, SessionApi
from services.conversations.histories import History, rename_calls
from services.lifecycle.forks import ForkRequest
from services.streams.turn import TurnStream

_BYTES_PER_TOKEN = 4
_ADDED_TOKENS = 32


@dataclass(frozen=True)
class Place:
    """A place to go on from: the end of turn `turn` of a session; `number` messages are before it."""

    session: Session
    turn: int
    number: int


@dataclass(frozen=True)
class Match:
    """What a session holds of a conversation.

    Attributes:
        opening: Digest of what comes before the conversation's first message.
        history: The conversation as far as it must be known.
        place: The end of the longest part that a session holds; None if no session holds any.
    """

    opening: bytes
    history: History
    place: Place | None = None


class Steps:
    """The steps of a conversation's turn on the way through its history."""

    def __init__(self, api: SessionApi, conversation: Conversation, history: History) -> None:
        self.api = api
        self._conversation = conversation
        self._history = history

    @property
    def in_background(self) -> bool:
        """True if what becomes of the turn is stored beside its session."""
        return self._conversation.in_background

    @property
    def has_key(self) -> bool:
        """True if the request may be repeated, and finds its sessions then."""
        return self._conversation.key is not None

    def derive_key(self, step: str, session: str = "") -> IdempotencyKey | None:
        """Return the key of a step; None for a request without one."""
        key = self._conversation.key
        return None if key is None else replace(key, scope=f"{key.scope} {step}", session=session)

    def check(self, number: int) -> None:
        """Check the size of the turn that begins behind `number` messages. Raises TurnTooLong."""
        self._check_size(self._history.messages[number:])

    def cut(self) -> list[tuple[int, int]]:
        """Return the first message and the end of each turn of the history. Raises TurnTooLong.

        What is before its last answer, and that answer, are as few turns as the limits allow: the first
        takes the pages of sessions that begin alike. What follows is a turn of its own, so that one
        that is given up leaves the history where the next request finds it.
        """
        *before, last = self._history.turns
        for start, end in (*before, last):
            self._check_size(self._history.messages[start:end])
        limits = self.api.limits
        sizes = [0, *accumulate(message.size for message in self._history.messages)]
        turns: list[tuple[int, int]] = []
        for start, end in before:
            first = turns[-1][0] if turns else start
            fits = end - first <= limits.max_turn_messages
            if turns and fits and sizes[end] - sizes[first] <= limits.max_turn_bytes:
                turns.pop()
                start = first
            turns.append((start, end))
        return [*turns, last]

    async def check_context(self) -> None:
        """Raise ContextExceeded for a history that does not fit the session.

        It is counted where it may be: before a long one is computed in several turns.
        """
        settings = self._conversation.settings
        limit = self.api.info.get_limit(recall=settings.recall)
        if limit is None:
            return
        tools = settings.tools
        messages = self._history.messages
        # A token has at least one byte, but for those that a template adds.
        if sum(message.size + _ADDED_TOKENS for message in messages) + sum(map(len, tools)) < limit:
            return
        tokens = await self.api.count_tokens(
            messages, tools, self._conversation.turn.opening, settings.template_arguments
        )
        if tokens >= limit:
            advice = "" if settings.recall else self.api.info.advise_recall()
            raise ContextExceeded("messages", tokens, limit, advice)

    def _check_size(self, messages: Sequence[Message]) -> None:
        """Check the size of one turn's messages. Raises TurnTooLong.

        One with too many bytes is said to exceed the context, by an estimate of its tokens.
        """
        limits, size = self.api.limits, sum(message.size for message in messages)
        if size > limits.max_turn_bytes:
            most = limits.max_turn_bytes // _BYTES_PER_TOKEN
            if (
                end := self.api.info.get_limit(recall=self._conversation.settings.recall)
            ) is not None:
                most = min(most, end)
            raise ContextExceeded("messages", max(size // _BYTES_PER_TOKEN, most + 1), most)
        check_size(messages, limits)

    async def create(self, step: str = "create", branch: bool = False) -> Place:
        """Create a session. Raises Overloaded before, where its turn would be refused behind it."""
        settings = replace(self._conversation.settings, matched=True, branch=branch)
        self._check_room()
        session = await self.api.create(settings, self.derive_key(step), self._history.messages)
        return Place(session, 0, 0)

    async def fork(self, place: Place, step: str = "fork", branch: bool = False) -> Place:
        """Fork the session at the place. Raises Overloaded as `create`."""
        parent = place.session.id
        self._check_room()
        request = ForkRequest(place.turn, queue=True, branch=branch)
        fork = await self.api.fork(parent, request, self.derive_key(step, parent))
        return replace(place, session=fork)

    def _check_room(self) -> None:
        """Raise Overloaded, but not for a request that may be answered already: that needs no room."""
        if not self.has_key:
            self.api.check_room(self._conversation.settings.tenant)

    async def append(self, place: Place, turns: Sequence[tuple[int, int]]) -> tuple[Place, int]:
        """Append turns to a new session; return its place, and the number of tokens computed.

        With a key it waits while a turn runs, which may be that of the same request.
        """
        session = place.session.id
        computed = 0
        for start, end in turns:
            key = self.derive_key(f"turn {place.turn}", session)
            request = TurnRequest(
                self._history.messages[start:end],
                generate=False,
                history=self._history.digests[end],
                follows=place.turn,
                queue=key is not None,
                background=self.in_background or self._conversation.turn.background,
            )
            computed += await _count_computed(self.api.turn(session, request, key))
            place = replace(place, turn=place.turn + 1, number=end)
        return place, computed

    async def begin(
        self, place: Place, match: MatchKind, appended: int = 0, choice: int | None = None
    ) -> Continuation:
        """Start the turn and wait until it is accepted, so that a refusal is raised here.

        `choice`: its number among several answers, of which each but the first has another seed.
        With a key it waits while a turn runs, which may be that of the same request.
        """
        session = place.session
        calls = [call.call for call in session.calls]
        turn = self._conversation.turn
        step = "turn" if choice is None else f"turn of choice {choice}"
        key = self.derive_key(step, session.id)
        request = replace(
            turn,
            messages=rename_calls(self._history.messages[place.number :], calls),
            history=self._history.digests[-1],
            follows=place.turn,
            seed=_vary_seed(turn.seed, place, choice) if choice else turn.seed,
            queue=turn.queue or key is not None,
            background=self.in_background or turn.background,
        )
        stream = self.api.turn(session.id, request, key)
        planned = None
        try:
            started = await anext(stream)
            assert isinstance(started, TurnStarted), "a turn begins with its acceptance"
            # Others of several answers wait behind the first, and nobody for one in the background.
            if not (started.replayed or choice or self.in_background):
                planned = await stream.wait_until_planned()
        except BaseException:
            await stream.aclose()
            raise
        if started.replayed:
            match = "repeated"
        held = session.memory.length
        asked = request.history
        ignored = (*self._conversation.ignored, *self._history.ignored)
        return Continuation(
            stream, session.id, started.turn, match, held, b"", asked, appended, ignored, planned
        )


def _vary_seed(seed: int | None, place: Place, choice: int) -> int:
    base = place.session.settings.seed + place.turn if seed is None else seed
    digest = blake2b(f"{base} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # seeds are signed


async def _count_computed(stream: TurnStream) -> int:
    """Read a turn to its end; return the number of tokens that it computed.

    Those whose rows it dropped are counted by the next turn, which computes them again.
    """
    computed = 0
    try:
        async for progress in stream:
            if isinstance(progress, TurnFinished):
                outcome = progress.outcome
                computed = outcome.prefilled_tokens - outcome.memory.unsettled
    finally:
        await stream.aclose()
    return computed
