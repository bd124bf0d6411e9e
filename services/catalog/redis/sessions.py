"""Single sessions in the Redis catalog: what is read of one, and what a commit does in its slot."""

from secrets import token_hex
from typing import Any

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    CatalogError,
    StaleEpoch,
    UnknownCall,
    UnknownEpisode,
    UnknownSession,
)
from kvrecall.domain.session import Session, Turn
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.base import (
    EpisodeSet,
    IdempotencyRecord,
    Lease,
    RepairCommit,
    RepairRecord,
    SegmentRecord,
)
from services.catalog.claims import busy
from services.catalog.redis import commits as changed
from services.catalog.redis import mapping as rows
from services.catalog.redis import scripts
from services.catalog.redis.client import Argument, CatalogRedis, Command
from services.catalog.redis.commits import RedisCommit
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.keys import (
    BUILT,
    EPISODES,
    LABELS,
    META,
    REPAIRS,
    SEGMENTS,
    SET,
    TOKENS,
    TURNS,
    Keys,
)
from services.catalog.serialization import token_values

NEW = "new"
_REPAIR_ATTEMPTS = 8


class ChangedMeanwhile(CatalogError):
    """A condition of a commit did not hold: somebody wrote in between."""

    code = ErrorCode.CHANGED_MEANWHILE


class RedisSessions:
    """Reads and commits of one session at a time. Raises UnknownSession, StaleEpoch, CatalogError."""

    def __init__(self, link: CatalogRedis, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    async def apply(
        self,
        session: str,
        changes: RedisCommit,
        *,
        epoch: int | str = "",
        before: str = "",
        answer: IdempotencyRecord | None = None,
    ) -> tuple[int, str]:
        """Make changes in one step: the session's epoch, and its tenant.

        `epoch` is what it must be (empty: any; NEW: the session must not exist), `before` the last time for it, in the
        server's seconds. A commit has an id, so that a call that is made again after a lost reply changes nothing.
        """
        names = self._keys.session(session)
        if answer is not None:
            assert answer.key.session == session, (
                "an answer lies with the session that its request names"
            )
            names.append(self._keys.answer(answer.key))
            text = RedisIdempotency.text(answer, made="")
            changes = changed.remembering(changes, text, RedisIdempotency.MILLISECONDS)
        header: list[Argument] = [token_hex(8), epoch, before]
        call = ("EVAL", scripts.APPLY, len(names), *names, *header, *changes.arguments())
        outcome, *details = await self._link.write(names[META], *call)
        if outcome == b"done":
            now, _, tenant = details[0].decode().partition(" ")
            return int(now), tenant
        raise _refused(session, epoch, outcome.decode(), details)

    async def read_each(self, sessions: list[str]) -> list[Session | None]:
        """Sessions as they were last committed, each by itself; None where there is none."""
        asked = [
            self.script(scripts.SESSION, session, *rows.SESSION_FIELDS) for session in sessions
        ]
        replies = await self._link.ask_each(asked)
        return [
            None if reply is None else rows.session_value(session, *reply)
            for session, reply in zip(sessions, replies, strict=True)
        ]

    async def read(self, session: str) -> Session:
        """The session."""
        (found,) = await self.read_each([session])
        if found is None:
            raise UnknownSession(session)
        return found

    async def exist(self, sessions: list[str]) -> list[bool]:
        """Which of the sessions there are."""
        names = [self._keys.meta(session) for session in sessions]
        return [
            bool(found)
            for found in await self._link.ask_each([(name, ("EXISTS", name)) for name in names])
        ]

    async def worker_state(self, session: str) -> bytes:
        """What was committed last."""
        there, state = await self.look(session, ("HGET", META, "state"))
        if not there:
            raise UnknownSession(session)
        return bytes(state)

    async def turns(self, session: str, after: int, limit: int) -> list[Turn]:
        """Up to `limit` turns with numbers over `after`."""
        if limit < 1:
            return []
        first = max(0, after)
        span = (first, first + limit - 1)
        _, entries, tokens = await self.look(
            session, ("LRANGE", TURNS, *span), ("LRANGE", TOKENS, *span)
        )
        return rows.turn_values(session, entries, tokens)

    async def token_ids(self, session: str) -> tuple[int, ...]:
        """Every token of every turn."""
        there, tokens = await self.look(session, ("LRANGE", TOKENS, 0, -1))
        if not there:
            raise UnknownSession(session)
        return token_values(b"".join(tokens))

    async def repairs(self, session: str, limit: int) -> list[RepairRecord]:
        """The last repairs, the newest first."""
        there, last, entries = await self.look(
            session, ("HGET", META, "repairs"), ("LRANGE", REPAIRS, 0, -1)
        )
        if not there:
            raise UnknownSession(session)
        return rows.repair_values(entries, int(last))[:limit]

    async def commit_repair(self, session: str, commit: RepairCommit, epoch: int) -> str:
        """What a repair changed. The session's tenant."""
        for _ in range(_REPAIR_ATTEMPTS):
            there, (turns, calls) = await self.look(session, ("HMGET", META, "turns", "calls"))
            if not there:
                raise UnknownSession(session)
            try:
                _, tenant = await self.apply(
                    session, changed.repair_committed(commit, int(turns), int(calls)), epoch=epoch
                )
            except ChangedMeanwhile:
                continue
            return tenant
        raise CatalogError(f"session {session!r} had turns committed faster than a repair could be")

    async def call(self, session: str, call: str) -> PendingCall:
        """The newest call of that id. Raises UnknownCall."""
        key, command = self.script(scripts.CALL, session, call)
        reply = await self._link.ask(key, *command)
        if reply is None:
            raise UnknownCall(session, call)
        parts, result, turns = reply
        return rows.said_value(rows.call_value(parts), result, int(turns))

    async def episodes(self, session: str) -> EpisodeSet:
        """The session's episodes."""
        there, found, episodes = await self.look(session, ("HGETALL", SET), ("HGETALL", EPISODES))
        if not there:
            raise UnknownSession(session)
        return rows.set_value(rows.mapping(found), rows.mapping(episodes))

    async def segments(self, session: str) -> list[SegmentRecord]:
        """Every segment, in time order."""
        _, segments, labels = await self.look(session, ("HGETALL", SEGMENTS), ("HGETALL", LABELS))
        return rows.segment_values(rows.mapping(segments), rows.mapping(labels))

    async def built_episode(self, session: str, episode: str) -> bytes:
        """An episode as the worker built it. Raises UnknownEpisode."""
        _, built = await self.look(session, ("HGET", BUILT, episode))
        if built is None:
            raise UnknownEpisode(session, episode)
        return bytes(built)

    async def claim(self, session: str, holder: str, seconds: float) -> Lease:
        """Be the one who works on the session. Raises SessionBusy."""
        meta = self._keys.meta(session)
        claim = self._keys.claim(session)
        milliseconds = max(1, round(1000 * seconds))
        outcome, *details = await self._link.ask(
            meta, "EVAL", scripts.CLAIM, 2, meta, claim, holder, milliseconds
        )
        if outcome == b"unknown":
            raise UnknownSession(session)
        if outcome == b"busy":
            raise busy(session, details[0].decode())
        return Lease(int(details[0]), details[1].decode())

    async def release(self, session: str, holder: str) -> None:
        """Give a claim back."""
        claim = self._keys.claim(session)
        await self._link.ask(claim, "EVAL", scripts.DROP_IF, 1, claim, holder)

    async def look(self, session: str, *commands: tuple[Any, ...]) -> list[Any]:
        """Whether there is such a session, and the replies to commands (name, key's place, words) at one time."""
        asked = RedisCommit()
        for name, place, *words in commands:
            asked.run(name, place, *words)
        key, command = self.script(scripts.READ, session, *asked.commands)
        replies: list[Any] = await self._link.ask(key, *command)
        return replies

    def script(self, script: str, session: str, *words: Argument) -> tuple[str, Command]:
        """A call of a script on a session's keys, and where it is run."""
        names = self._keys.session(session)
        return names[META], ("EVAL", script, len(names), *names, *words)


def _refused(session: str, epoch: int | str, outcome: str, details: list[bytes]) -> Exception:
    if outcome == "unknown":
        return UnknownSession(session)
    if outcome == "stale":
        now = int(details[0])
        return StaleEpoch(
            f"session {session!r} is at epoch {now}, not {epoch}: another process took it over"
        )
    if outcome == "changed":
        return ChangedMeanwhile(
            f"session {session!r} was changed meanwhile, or the answer was given already"
        )
    if outcome == "late":
        return CatalogError(f"session {session!r} took too long to be made; try again")
    return CatalogError(f"there is a session {session!r} already")
