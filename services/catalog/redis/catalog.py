"""The catalog on Redis, which several gateways share: one server, a primary behind sentinels, or a cluster.

All keys of a session have one hash tag, so a session lies in one slot, and each commit is one script there, which
checks the epoch. A commit carries an id that is remembered with the session: made again, because a connection was cut
or a primary replaced, it changes nothing and returns what it returned. What lies elsewhere (lists, sums, who shares
what) is written in such an order that a crash in between leaves at worst an entry too many, which is verified when it
is read and swept in time. Sessions never expire; answers of requests do, after a day.

Durable means: a commit returns when the primary has it and, where it has replicas, one of these has it too. That
outlives the loss of one server. Whether a restart of all of them is survived is their configuration: `appendonly yes`
keeps what was written through kill -9, `appendfsync always` also through a loss of power (`everysec` may lose the last
second), `min-replicas-to-write 1` stops a primary that is cut off from taking writes, and `maxmemory-policy noeviction`
keeps Redis from dropping sessions when memory runs out. Claims are not waited for: one that a failover loses costs a
turn that begins in vain, as epochs say who writes. Redis 6.2 or later.
"""

import asyncio
from contextlib import suppress

from kvrecall.domain.errors import CatalogError, CatalogVersion
from kvrecall.domain.session import Session, SharedPages, Turn
from kvrecall.domain.tool_calls import PendingCall
from services.cancellation import run_to_completion
from services.catalog.base import (
    BuildCommit,
    EpisodeSet,
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    KnownPrefix,
    Lease,
    OrphanedPages,
    RepairCommit,
    RepairRecord,
    SegmentRecord,
    SegmentsCommit,
    SessionDump,
    SessionPage,
    TurnCommit,
)
from services.catalog.redis import commits as changed
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis, Client
from services.catalog.redis.commits import RedisCommit
from services.catalog.redis.copies import restored
from services.catalog.redis.forks import forked
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes import RedisIndexes
from services.catalog.redis.keys import META, Keys
from services.catalog.redis.page_refs import RedisPageRefs
from services.catalog.redis.prefixes import RedisPrefixes
from services.catalog.redis.sessions import NEW, RedisSessions

VERSION = 1


class RedisCatalog:
    """A `Catalog` of the keys that begin with `namespace`."""

    def __init__(self, link: CatalogRedis, namespace: str) -> None:
        keys = Keys(namespace)
        self._link = link
        self._keys = keys
        self._sessions = RedisSessions(link, keys)
        self._answers = RedisIdempotency(link, keys)
        self._listing = RedisIndexes(link, keys, self._sessions)
        self._prefixes = RedisPrefixes(link, keys, self._sessions)
        self._sharing = RedisPageRefs(link, keys, self._sessions, self._listing, self._prefixes)

    @classmethod
    async def open(
        cls,
        client: Client,
        namespace: str,
        *,
        timeout_seconds: float = 5.0,
        patience_seconds: float = 15.0,
    ) -> "RedisCatalog":
        """The catalog that `client`, which it owns from then on, reaches; the client answers with bytes.

        What fails but may pass is tried again for `patience_seconds`: as long as a failover takes. Raises
        CatalogVersion for a namespace of another version, CatalogError when Redis does not answer.
        """
        catalog = cls(CatalogRedis(client, timeout_seconds, patience_seconds), namespace)
        try:
            await catalog._check_version()
        except BaseException:
            await catalog.close()
            raise
        return catalog

    async def close(self) -> None:
        """Close all connections."""
        await self._link.close()

    async def create(
        self, session: Session, worker_state: bytes, answer: IdempotencyRecord | None
    ) -> None:
        """See `Catalog.create`."""
        await run_to_completion(self._make(session, changed.created(session, worker_state), answer))

    async def session(self, session: str) -> Session:
        """See `Catalog.session`."""
        return await self._sessions.read(session)

    async def worker_state(self, session: str) -> bytes:
        """See `Catalog.worker_state`."""
        return await self._sessions.worker_state(session)

    async def page(self, limit: int, cursor: str | None, tenant: str = "") -> SessionPage:
        """See `Catalog.page`."""
        return await self._listing.page(limit, cursor, tenant)

    async def session_ids(self) -> list[str]:
        """See `Catalog.session_ids`."""
        return await self._listing.ids()

    async def turns(self, session: str, after: int, limit: int) -> list[Turn]:
        """See `Catalog.turns`."""
        return await self._sessions.turns(session, after, limit)

    async def token_ids(self, session: str) -> tuple[int, ...]:
        """See `Catalog.token_ids`."""
        return await self._sessions.token_ids(session)

    async def repairs(self, session: str, limit: int) -> list[RepairRecord]:
        """See `Catalog.repairs`."""
        return await self._sessions.repairs(session, limit)

    async def claim(self, session: str, holder: str, seconds: float) -> Lease:
        """See `Catalog.claim`."""
        return await self._sessions.claim(session, holder, seconds)

    async def release(self, session: str, holder: str) -> None:
        """See `Catalog.release`."""
        await self._sessions.release(session, holder)

    async def take_over(self, session: str, worker: str) -> int:
        """See `Catalog.take_over`."""
        changes = RedisCommit().run("HINCRBY", META, "epoch", 1).put(META, {"worker": worker})
        epoch, _ = await run_to_completion(self._sessions.apply(session, changes))
        return epoch

    async def fork(self, commit: ForkCommit, answer: IdempotencyRecord | None) -> None:
        """See `Catalog.fork`."""
        await run_to_completion(self._fork(commit, answer))

    async def _fork(self, commit: ForkCommit, answer: IdempotencyRecord | None) -> None:
        child = commit.session
        changes = await forked(self._link, self._sessions, commit)
        before = await self._sharing.promise_all(child.id, child.shared)
        await self._make(child, changes, answer, before)
        await self._listing.note_length(child.id, child.settings.tenant, child.memory.length)

    async def restore(self, dump: SessionDump) -> None:
        """See `Catalog.restore`."""
        await run_to_completion(self._restore(dump))

    async def _restore(self, dump: SessionDump) -> None:
        session = dump.session
        await self._make(session, restored(dump), None)
        await self._listing.note_length(session.id, session.settings.tenant, session.memory.length)

    async def share(self, session: str, shared: SharedPages) -> bool:
        """See `Catalog.share`."""
        return await run_to_completion(self._sharing.promise(session, shared))

    async def prefix(self, digest: str) -> KnownPrefix | None:
        """See `Catalog.prefix`."""
        return await self._prefixes.read(digest)

    async def kept_pages(self) -> list[SharedPages]:
        """See `Catalog.kept_pages`."""
        return await self._sharing.kept()

    async def tenant_tokens(self, tenant: str) -> int:
        """See `Catalog.tenant_tokens`."""
        return await self._listing.tokens(tenant)

    async def commit_turn(
        self, commit: TurnCommit, epoch: int, answer: IdempotencyRecord | None
    ) -> None:
        """See `Catalog.commit_turn`."""
        await run_to_completion(self._commit_turn(commit, epoch, answer))

    async def _commit_turn(
        self, commit: TurnCommit, epoch: int, answer: IdempotencyRecord | None
    ) -> None:
        turn = commit.turn
        changes = changed.turn_committed(commit)
        if commit.calls:
            await self._listing.pause(turn.session, turn.number, changes.at)
        for shared in commit.shared or ():
            await self._sharing.promise(turn.session, shared)
        _, tenant = await self._sessions.apply(turn.session, changes, epoch=epoch, answer=answer)
        # The commit stands from here on, whatever becomes of the rest.
        afterwards = [self._listing.note_length(turn.session, tenant, turn.outcome.memory.length)]
        if commit.shared is not None:
            afterwards.append(self._sharing.settle_on(turn.session, commit.shared))
        if commit.prefix is not None:
            afterwards.append(self._prefixes.offer(commit.digest, commit.prefix))
        await asyncio.gather(*afterwards)

    async def commit_repair(self, session: str, commit: RepairCommit, epoch: int) -> None:
        """See `Catalog.commit_repair`."""
        await run_to_completion(self._commit_repair(session, commit, epoch))

    async def _commit_repair(self, session: str, commit: RepairCommit, epoch: int) -> None:
        tenant = await self._sessions.commit_repair(session, commit, epoch)
        if commit.memory is not None:
            await self._listing.note_length(session, tenant, commit.memory.length)

    async def call(self, session: str, call: str) -> PendingCall:
        """See `Catalog.call`."""
        return await self._sessions.call(session, call)

    async def commit_call(
        self, session: str, call: PendingCall, epoch: int, answer: IdempotencyRecord | None
    ) -> None:
        """See `Catalog.commit_call`."""
        await run_to_completion(
            self._sessions.apply(session, changed.call_reported(call), epoch=epoch, answer=answer)
        )

    async def silent(self, since: float) -> list[str]:
        """See `Catalog.silent`."""
        return await self._listing.silent(since)

    async def episodes(self, session: str) -> EpisodeSet:
        """See `Catalog.episodes`."""
        return await self._sessions.episodes(session)

    async def segments(self, session: str) -> list[SegmentRecord]:
        """See `Catalog.segments`."""
        return await self._sessions.segments(session)

    async def built_episode(self, session: str, episode: str) -> bytes:
        """See `Catalog.built_episode`."""
        return await self._sessions.built_episode(session, episode)

    async def commit_segments(self, session: str, commit: SegmentsCommit, epoch: int) -> None:
        """See `Catalog.commit_segments`."""
        await run_to_completion(
            self._sessions.apply(session, changed.segments_added(commit), epoch=epoch)
        )

    async def commit_build(self, session: str, commit: BuildCommit, epoch: int) -> None:
        """See `Catalog.commit_build`."""
        await run_to_completion(
            self._sessions.apply(session, changed.episodes_built(commit), epoch=epoch)
        )

    async def forget_episodes(self, session: str, epoch: int) -> None:
        """See `Catalog.forget_episodes`."""
        await run_to_completion(
            self._sessions.apply(session, changed.episodes_forgotten(), epoch=epoch)
        )

    async def delete(self, session: str, answer: IdempotencyRecord | None) -> list[OrphanedPages]:
        """See `Catalog.delete`."""
        return await run_to_completion(self._sharing.delete(session, answer))

    async def leftovers(self) -> list[OrphanedPages]:
        """See `Catalog.leftovers`."""
        return await run_to_completion(self._sharing.leftovers())

    async def dropped(self, leftover: OrphanedPages) -> None:
        """See `Catalog.dropped`."""
        await run_to_completion(self._sharing.dropped(leftover))

    async def recall(self, key: IdempotencyKey) -> str | None:
        """See `Catalog.recall`."""
        return await self._answers.recall(key)

    async def _make(
        self,
        session: Session,
        changes: RedisCommit,
        answer: IdempotencyRecord | None,
        before: str = "",
    ) -> None:
        """Add a session: first where it is listed, then itself, then again in case that took long."""
        await self._answers.promise(answer, session.id)
        await self._listing.add(session, last_event_at=changes.at)
        await self._sessions.apply(session.id, changes, epoch=NEW, before=before)
        with suppress(CatalogError):
            await self._listing.add(session, last_event_at=0.0)

    async def _check_version(self) -> None:
        name = self._keys.version
        found = await self._link.write(name, "EVAL", scripts.REPLACE_IF, 1, name, VERSION, "", "")
        if found != str(VERSION).encode():
            raise CatalogVersion(
                f"the catalog {self._keys.namespace!r} in Redis has version {found.decode()}, this kvrecall reads "
                f"version {VERSION}; run the kvrecall that wrote it, or choose another namespace"
            )
