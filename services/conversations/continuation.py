"""A conversation on its way to a turn: what is asked, what it needs, and what was found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.tolerance.ignored import Ignored
from kvrecall.domain.turn_request import TurnRequest
from kvrecall.domain.worker_info import WorkerInfo
from services.catalog.records import IdempotencyKey
from services.catalog.responses import StoredResponse
from services.conversations.histories import extend
from services.lifecycle.forks import ForkRequest
from services.streams.turn import ProgressStream, TurnPlanned, TurnStream

MatchKind = Literal["continued", "forked", "built", "repeated"]
"""How the session of a turn was found: the same one, a fork, a new one, or that of the same request."""


class SessionApi(Protocol):
    """The part of `SessionService` that conversations call."""

    @property
    def info(self) -> WorkerInfo:
        """Model, shape and limits of the worker."""
        ...

    @property
    def limits(self) -> ServiceLimits:
        """Limits and defaults that the operator chose."""
        ...

    async def create(
        self,
        request: CreateSession,
        key: IdempotencyKey | None = None,
        messages: Sequence[Message] = (),
    ) -> Session:
        """Open a session that begins with the messages."""
        ...

    async def fork(
        self, session: str, request: ForkRequest, key: IdempotencyKey | None = None
    ) -> Session:
        """Create a session that begins at the end of another's turn."""
        ...

    async def delete(self, session: str) -> None:
        """Delete a session and its rows."""
        ...

    async def delete_unused(self, session: Session) -> bool:
        """Delete a session unless a turn followed or one runs; return whether it was deleted."""
        ...

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded if a tenant's turn that came now would be refused for want of room."""
        ...

    async def count_tokens(
        self,
        messages: Sequence[Message],
        tools: Sequence[str],
        opening: str = "",
        template_arguments: str = "{}",
    ) -> int:
        """Count the tokens of a prompt, with the answer's `opening`."""
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
    settings, and salt, is continued. `turn` has the sampling; its messages are not read. `opening` comes
    before everything else. `follows`: the response whose conversation, without its own opening,
    comes before `messages`. `ignored`: what was mended in these. `in_background`: what becomes of the
    turn is stored beside its session, which stays even if the turn fails.
    """

    messages: tuple[Message, ...]
    settings: CreateSession
    turn: TurnRequest
    key: IdempotencyKey | None = None
    opening: tuple[Message, ...] = ()
    follows: StoredResponse | None = None
    ignored: tuple[Ignored, ...] = ()
    in_background: bool = False


@dataclass(frozen=True)
class Direction:
    """Where a conversation goes on; by default where its history is found.

    - `session`: the id of a session that holds all but what is new; empty: it is looked for.
    - `only_new`: the messages are those that follow what the session holds.
    - `alone`: in a session of its own, which no other request finds and which is deleted behind the
      answer.
    """

    session: str = ""
    only_new: bool = False
    alone: bool = False


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

    `held_tokens` of the conversation were in the session before, `appended_tokens` were computed in
    turns that this request appended before its own.
    `opening` is the digest of what comes before the conversation's first message, `asked` that of
    the conversation up to the answer. `ignored`: what of the messages was mended, by its place in them.
    `planned`: the tokens as the worker has counted them; None for a turn that waits for its worker.
    """

    stream: ProgressStream
    session: str
    turn: int
    match: MatchKind
    held_tokens: int
    opening: bytes
    asked: bytes
    appended_tokens: int = 0
    ignored: tuple[Ignored, ...] = ()
    planned: TurnPlanned | None = None

    @property
    def place(self) -> ReplyPlace:
        """The place of the answer, from which `Conversations.follow` goes on."""
        return ReplyPlace(self.session, self.turn, self.asked)

    def history(self, answer: Message) -> bytes:
        """Return the digest of the conversation with the answer."""
        return extend(self.asked, answer)
