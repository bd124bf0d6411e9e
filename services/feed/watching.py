"""Streams for readers that watch: a snapshot of what is, then notices of what changes."""

from collections import Counter

from kvrecall.domain.sessions.state_machine import SessionState
from services.catalog.base import Catalog
from services.feed.feed import Feed, Subscription
from services.feed.notices import SNAPSHOT, Notice, Value
from services.reading.versions import get_version
from services.sessions.manager import SessionManager


class Watching:
    """Begins subscriptions, each with a snapshot.

    The subscription begins before the snapshot is read, so nothing between the two is missed; a
    notice may be of something that the snapshot has already.
    """

    def __init__(self, catalog: Catalog, sessions: SessionManager, feed: Feed) -> None:
        self._catalog = catalog
        self._sessions = sessions
        self._feed = feed

    async def watch_session(self, session: str, tenant: str) -> Subscription:
        """Watch one session of a tenant. Raises UnknownSession, Overloaded, ShuttingDown."""
        subscription = self._feed.subscribe(tenant, session)
        try:
            data = await self._describe_session(session, tenant)
        except BaseException:
            await subscription.aclose()
            raise
        subscription.begin(Notice(SNAPSHOT, tenant, session, data))
        return subscription

    async def watch_tenant(self, tenant: str) -> Subscription:
        """Watch all sessions of a tenant. Raises Overloaded, ShuttingDown."""
        subscription = self._feed.subscribe(tenant)
        try:
            active = [
                {"session": id, "state": state.value}
                for id, state in self.get_active(tenant).items()
            ]
            data = {"active": active, "sessions": await self._catalog.sessions.count(tenant)}
        except BaseException:
            await subscription.aclose()
            raise
        subscription.begin(Notice(SNAPSHOT, tenant, "", data))
        return subscription

    def get_active(self, tenant: str) -> dict[str, SessionState]:
        """Return the tenant's sessions in which a turn or a repair runs here, with their states."""
        return {
            live.id: live.state
            for live in self._sessions.all()
            if live.tenant == tenant and not live.idle
        }

    async def overview(self, tenant: str) -> tuple[int, dict[str, int]]:
        """Return the number of the tenant's sessions, and of the active ones here by state."""
        counts = Counter(state.value for state in self.get_active(tenant).values())
        states = (SessionState.PREFILLING, SessionState.DECODING, SessionState.REPAIRING)
        active = {state.value: counts[state.value] for state in states}
        return await self._catalog.sessions.count(tenant), active

    async def _describe_session(self, session: str, tenant: str) -> dict[str, Value]:
        found = await self._catalog.sessions.get(session, tenant)
        live = self._sessions.find(session)
        state = found.committed_state if live is None or live.idle else live.state
        return {
            "state": state.value,
            "turns": found.turns,
            "length": found.memory.length,
            "repairs": len(found.repairs),
            "calls": [{"call": call.call.id, "status": call.status.value} for call in found.calls],
            "episode": (await self._catalog.episodes.get(session)).active,
            "worker": found.worker,
            "epoch": found.epoch,
            "version": get_version(found, state),
        }
