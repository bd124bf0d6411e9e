"""What a turn remembers: the passages of its memory that are nearest to the user's last message."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrecall.domain.episodes import Vectors, cosine
from kvrecall.domain.errors import (
    EmbeddingRefused,
    UnknownSession,
    WorkerLost,
    WorkerRefused,
)
from kvrecall.domain.events import EpisodesFailed
from kvrecall.domain.messages import Message
from kvrecall.domain.page_ids import ID_BYTES
from kvrecall.domain.passages import PASSAGES_PER_TURN, locate
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.spans import span
from services.context import ServiceContext
from services.embedding import embed_query
from services.memories.vectors import VectorCache

# Sessions of a memory that are looked through, the newest.
_MOST_SESSIONS = 512
_TURNS_PER_READ = 128
# Of the log's end, while the user's last message is looked for.
_TURNS_AT_ONCE = 8


@dataclass(frozen=True)
class Remembered:
    """Passages for a turn, the nearest last, the sessions that they are of, and the seconds of the search."""

    passages: tuple[pb.Passage, ...]
    sessions: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class _Candidate:
    """A passage of a session: tokens `start` .. `stop - 1` of its log."""

    session: Session
    start: int
    stop: int


@dataclass(frozen=True)
class _Log:
    """A session's page ids, joined, and all tokens that its turns appended."""

    page_ids: bytes
    token_ids: tuple[int, ...]

    def get_tokens(self, each: _Candidate) -> Sequence[int]:
        """Get the tokens that the log has where a passage is."""
        return self.token_ids[each.start : each.stop]

    def cut(self, each: _Candidate, turns: Sequence[Turn], page_tokens: int) -> pb.Passage | None:
        """Cut a passage; None for one that was rewritten since: it is no longer said as its tokens were.

        turns: all, if some of them have rewritten the log.
        """
        start, stop = each.start, each.stop
        token_ids = self.get_tokens(each)
        if turns:
            start, stop = locate(turns, start, stop)
        if stop - start != len(token_ids):
            return None
        first, last = start // page_tokens, -(-stop // page_tokens)
        ids = self.page_ids[first * ID_BYTES : last * ID_BYTES]
        whole = len(ids) == (last - first) * ID_BYTES
        # The end of a session has no page yet.
        return pb.Passage(
            page_ids=ids if whole else b"", start=start, stop=stop, token_ids=token_ids
        )


class MemoryFinder:
    """Finds what turns remember. No turn fails because that fails."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._events = context.events
        self._seconds = context.limits.match_seconds
        self._vectors = VectorCache(context.catalog.episodes)

    async def find(
        self, session: Session, messages: Sequence[Message], page_tokens: int
    ) -> Remembered | None:
        """Find what a turn of these messages remembers; None without a memory, or where it has nothing.

        A turn of a tool's results remembers what the user's message before it did. What fails is published
        as an event. Raises CatalogError.
        """
        if not session.settings.remember:
            return None
        started = time.monotonic()
        text = await self._read_question(session, messages)
        if not text:
            return None
        try:
            with span("remember"):
                candidates = await self._rank(session, text)
                found = await self._cut(session, candidates, page_tokens)
        except (WorkerRefused, WorkerLost, EmbeddingRefused) as error:
            self._events.publish(EpisodesFailed(session.id, "remember", error.code, error.message))
            return None
        if not found:
            return None
        passages, sessions = zip(*reversed(found), strict=True)
        seconds = time.monotonic() - started
        return Remembered(passages, tuple(dict.fromkeys(sessions)), seconds)

    async def _read_question(self, session: Session, messages: Sequence[Message]) -> str:
        """Read the user's last message, of the turn or from the log; empty if there is none."""
        text = _find_question(messages)
        first = session.turns
        while not text and first > 0:
            after = max(0, first - _TURNS_AT_ONCE)
            turns = await self._catalog.turns.get_after(session.id, after, first - after)
            text = _find_question([message for turn in turns for message in turn.messages])
            first = after
        return text

    async def _rank(self, session: Session, text: str) -> Iterator[_Candidate]:
        """Rank the passages of the session's memory by their nearness to a text, the nearest first.

        Its own are among them once it has more than a turn sees.
        """
        settings = session.settings
        members = await self._catalog.memories.get_newest(
            settings.tenant, settings.memory, _MOST_SESSIONS
        )
        known = [each for each in members if each.turns]
        if not known:
            return iter(())
        query = await embed_query(self._worker, text, self._seconds)
        scores, places = list[Vectors](), list[tuple[Session, np.ndarray]]()
        for each in known:
            try:
                found = await self._vectors.get(each)
            except UnknownSession:
                continue  # deleted meanwhile
            if each.id == session.id and len(found.spans) <= PASSAGES_PER_TURN:
                continue
            if found.vectors.shape == (len(found.spans), len(query)):
                scores.append(cosine(query, found.vectors))
                places += [(each, bounds) for bounds in found.spans]
        if not places:
            return iter(())
        order = np.argsort(-np.concatenate(scores), kind="stable")
        return (_Candidate(places[index][0], *map(int, places[index][1])) for index in order)

    async def _cut(
        self, session: Session, ranked: Iterator[_Candidate], page_tokens: int
    ) -> list[tuple[pb.Passage, str]]:
        """Cut the first passages; returns each with its session.

        Of what sessions have alike, as forks of one do, one counts: the session's own, if it has it.
        """
        found: list[tuple[pb.Passage, str]] = []
        own = await self._read_log(session)
        logs = {session.id: own}
        turns: dict[str, Sequence[Turn]] = {}
        seen = set[tuple[int, Sequence[int]]]()
        for each in ranked:
            name = each.session.id
            try:
                log = logs[name] = logs.get(name) or await self._read_log(each.session)
            except UnknownSession:
                continue  # deleted meanwhile
            said = each.start, log.get_tokens(each)
            if said in seen or (log is not own and own.get_tokens(each) == said[1]):
                continue
            seen.add(said)
            if each.session.memory.dropped_tokens and name not in turns:
                turns[name] = await self._read_turns(name)
            passage = log.cut(each, turns.get(name, ()), page_tokens)
            if passage is not None:
                found.append((passage, name))
            if len(found) == PASSAGES_PER_TURN:
                break
        return found

    async def _read_log(self, session: Session) -> _Log:
        """Read a session's log. Raises UnknownSession."""
        page_ids = await self._catalog.sessions.get_page_ids(session.id)
        return _Log(page_ids, await self._catalog.turns.get_token_ids(session.id))

    async def _read_turns(self, session: str) -> Sequence[Turn]:
        """Read all turns of a session."""
        turns: list[Turn] = []
        while more := await self._catalog.turns.get_after(session, len(turns), _TURNS_PER_READ):
            turns += more
        return turns


def _find_question(messages: Sequence[Message]) -> str:
    """Return the text of the user's last message; empty if there is none."""
    return next((each.content for each in reversed(messages) if each.role == "user"), "")
