"""Access to single sessions in Redis: scripts on the keys of one session, which share a slot."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from secrets import token_hex
from typing import Any, NamedTuple

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import (
    CatalogError,
    DataKeyDeleted,
    ServiceError,
    StaleEpoch,
    UnknownSession,
)
from kvrecall.domain.sessions.session import Session
from services.catalog.encryption.cipher import Cipher
from services.catalog.encryption.ciphers import Ciphers, PlainCiphers
from services.catalog.records import IdempotencyRecord
from services.catalog.redis import mapping, scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import META, Keys
from services.catalog.redis.connection.shared import Argument, Command
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.slot.commits import RedisCommit

# Stands for the epoch of a session that must not exist yet.
NEW = "new"
_DECODED_SESSIONS = 1024
_DECODED_BYTES = 8192


class Applied(NamedTuple):
    """A commit that was applied: epoch and tenant of the session, and the bytes that it grew by."""

    epoch: int
    tenant: str
    grown: int


class _Parts(NamedTuple):
    """What a session is decoded from: its cipher, and a reply of READ_SESSION."""

    id: str
    cipher: Cipher
    values: Sequence[bytes | None]
    calls: Sequence[Sequence[bytes | None]]
    repairs: Sequence[bytes]


class ChangedMeanwhile(CatalogError):
    """A condition of a commit did not hold: another process wrote in between."""

    code = ErrorCode.CHANGED_MEANWHILE


class SessionSlots:
    """Commits and reads, each on one session. Raises UnknownSession, StaleEpoch, CatalogError."""

    def __init__(self, redis: CatalogRedis, keys: Keys, tenants: Ciphers | None = None) -> None:
        """`tenants`: the ciphers of sessions by their tenants; None: they are not encrypted."""
        self._redis = redis
        self._keys = keys
        self._ciphers = tenants or PlainCiphers()
        self._decode_known = lru_cache(_DECODED_SESSIONS)(_decode)

    async def apply(
        self,
        session_id: str,
        commit: RedisCommit,
        *,
        epoch: int | str = "",
        record: IdempotencyRecord | None = None,
    ) -> Applied:
        """Apply a commit in one step.

        `epoch` is the required one (empty: any; NEW: the session must not exist). A commit carries an
        id: sent again after a lost reply, it changes nothing.
        """
        names = self._keys.get_session_keys(session_id)
        if record is not None:
            require_own_slot(record, session_id)
            names.append(self._keys.get_record(record.key))
            text = RedisIdempotency.encode(record, created="")
            commit = commit.store_record(text, RedisIdempotency.MILLISECONDS)
        header: list[Argument] = [token_hex(8), epoch, "1" if commit.allow_oom else ""]
        call = ("EVAL", scripts.APPLY_COMMIT, len(names), *names, *header, *commit.to_arguments())
        outcome, *details = await self._redis.write(names[META], *call)
        if outcome == b"done":
            current, grown, tenant = details[0].decode().split(" ", 2)
            return Applied(int(current), tenant, int(grown))
        raise _build_refusal(session_id, epoch, outcome.decode(), details)

    async def get(self, session_id: str, tenant: str | None = None) -> Session:
        """Return a session as last committed, if it is the tenant's. Raises DataKeyDeleted, too."""
        (parts,) = await self._read_each([session_id], [tenant])
        if parts is None:
            raise UnknownSession(session_id)
        return self._decode(parts)

    async def get_each(self, session_ids: list[str]) -> list[Session | None]:
        """Return sessions, each as last committed; None in place of one that does not exist.

        None as well for one that nobody can read, as its tenant's data key was deleted.
        """
        sessions: list[Session | None] = [None] * len(session_ids)
        for index, parts in enumerate(await self._read_each(session_ids, None)):
            if parts is not None:
                with suppress(DataKeyDeleted):
                    sessions[index] = self._decode(parts)
        return sessions

    async def _read_each(
        self, session_ids: list[str], tenants: Sequence[str | None] | None
    ) -> list[_Parts | None]:
        """Read what sessions are decoded from, None in place of one that does not exist.

        With `tenants`, None as well for a session of another tenant than the one given for it.

        One command reads a session of which META has everything; a script reads those with open
        calls or repairs since the last turn.
        """
        names = [self._keys.get_meta(session_id) for session_id in session_ids]
        fields = (*mapping.HEAD_FIELDS, *mapping.SESSION_FIELDS)
        replies = await self._redis.read_each([(name, ("HMGET", name, *fields)) for name in names])
        shown = {
            index: reply
            for index, reply in enumerate(replies)
            if reply[0] is not None and not (tenants and not _is_of(reply[2], tenants[index]))
        }
        owners = {reply[2] for reply in shown.values()}
        ciphers = {owner: await self._ciphers.to_read(owner.decode()) for owner in owners}
        spread = [session_ids[index] for index, reply in shown.items() if _is_spread(reply)]
        scripted = await self._read_scripted(spread)
        parts: list[_Parts | None] = [None] * len(session_ids)
        for index, (_, _, owner, *values) in shown.items():
            id = session_ids[index]
            found = scripted[id] if id in scripted else (tuple(values), (), ())
            parts[index] = None if found is None else _Parts(id, ciphers[owner], *found)
        return parts

    async def _read_scripted(self, session_ids: list[str]) -> dict[str, Any]:
        commands = [
            self.build_call(scripts.READ_SESSION, session_id, *mapping.SESSION_FIELDS)
            for session_id in session_ids
        ]
        replies = await self._redis.read_each(commands)
        return dict(zip(session_ids, replies, strict=True))

    def _decode(self, parts: _Parts) -> Session:
        """Decode a session; a small one that has not changed since its last read is still known."""
        is_whole = not parts.calls and not parts.repairs
        if is_whole and sum(map(len, filter(None, parts.values))) <= _DECODED_BYTES:
            return self._decode_known(parts.id, tuple(parts.values), parts.cipher)
        return mapping.from_session_parts(
            parts.id, parts.values, parts.calls, parts.repairs, parts.cipher
        )

    async def exist(self, session_ids: list[str]) -> list[bool]:
        """Return for each session whether it exists."""
        names = [self._keys.get_meta(session_id) for session_id in session_ids]
        replies = await self._redis.read_each([(name, ("EXISTS", name)) for name in names])
        return [bool(found) for found in replies]

    async def read(self, session_id: str, *commands: tuple[Any, ...]) -> list[Any]:
        """Run reading commands (name, index of a key, words) on a session at one time.

        Returns whether the session exists, and the reply to each command.
        """
        collected = RedisCommit()
        for name, index, *words in commands:
            collected.run(name, index, *words)
        replies: list[Any] = await self.run(scripts.READ_COMMANDS, session_id, *collected.commands)
        return replies

    async def run(self, script: str, session_id: str, *words: Argument) -> Any:
        """Run a reading script on a session's keys and return its reply."""
        key, call = self.build_call(script, session_id, *words)
        return await self._redis.read(key, *call)

    def build_call(self, script: str, session_id: str, *words: Argument) -> tuple[str, Command]:
        """Build the call of a script on a session's keys, after the key to route it by."""
        names = self._keys.get_session_keys(session_id)
        return names[META], ("EVAL", script, len(names), *names, *words)


def _decode(session_id: str, values: tuple[bytes | None, ...], cipher: Cipher) -> Session:
    """Decode a session without open calls and repairs."""
    return mapping.from_session_parts(session_id, values, (), (), cipher)


def _is_spread(reply: Sequence[bytes]) -> bool:
    """Return whether a session has open calls, or repairs since its last turn."""
    calls, recent, *_ = reply
    return bool(int(calls) or int(recent))


def _is_of(owner: bytes, tenant: str | None) -> bool:
    return tenant is None or owner == tenant.encode()


def was_refused(error: ServiceError) -> bool:
    """Return whether a commit that failed changed nothing; after other failures it may stand."""
    return not isinstance(error, CatalogError) or isinstance(error, ChangedMeanwhile)


def build_incomplete(session_id: str) -> CatalogError:
    """Build the error for a session of which Redis has lost a part."""
    return CatalogError(
        f"session {session_id!r} is incomplete: Redis has lost a part of its turn log, perhaps by "
        "eviction; set maxmemory-policy to noeviction, then delete the session or restore Redis "
        "from a backup"
    )


def require_own_slot(record: IdempotencyRecord, id: str) -> None:
    """Check that a record can be stored in one step with a change of a session or conversation."""
    assert record.key.session == id, "a record lies with what its request names"


def _build_refusal(
    session_id: str, epoch: int | str, outcome: str, details: list[bytes]
) -> Exception:
    if outcome == "unknown":
        return UnknownSession(session_id)
    if outcome == "stale":
        return StaleEpoch(
            f"session {session_id!r} is at epoch {int(details[0])}, not {epoch}: "
            "another process took it over"
        )
    if outcome == "changed" and details[0] == b"LLEN":
        return build_incomplete(session_id)
    if outcome == "changed":
        return ChangedMeanwhile(
            f"session {session_id!r} was changed meanwhile, or the request was answered already"
        )
    return CatalogError(f"there is a session {session_id!r} already")
