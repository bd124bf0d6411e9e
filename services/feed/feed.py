"""The feed: notices to the readers of this gateway's streams, and by a relay to other gateways'."""

import asyncio
from collections import deque

from kvrecall.domain.errors import Overloaded, ShuttingDown
from kvrecall.domain.events import ServiceEvent
from kvrecall.domain.fairness.bound import has_room
from kvrecall.domain.limits import ServiceLimits
from services.feed.notices import DELETED, Notice, to_notices
from services.feed.relay import Relay
from services.sessions.manager import SessionManager

_UNREAD = 256


class Subscription:
    """The notices of a tenant, or of one of its sessions, for one reader.

    A reader who leaves more than 256 unread is dropped: its stream ends, and it begins anew with a
    snapshot.
    """

    def __init__(self, feed: "Feed", tenant: str, session: str | None) -> None:
        self._feed = feed
        self.tenant = tenant
        self._session = session
        self._unread: deque[Notice] = deque()
        self._changed = asyncio.Event()
        self.ended = False

    def __aiter__(self) -> "Subscription":
        return self

    async def __anext__(self) -> Notice:
        while not self._unread:
            if self.ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._unread.popleft()

    async def aclose(self) -> None:
        """End the subscription."""
        self._feed.remove(self)

    def begin(self, snapshot: Notice) -> None:
        """Put a snapshot before what has come since the subscription began."""
        self._unread.appendleft(snapshot)
        self._changed.set()

    def offer(self, notice: Notice) -> None:
        """Add a notice, if it is one for this reader."""
        wanted = self._session in (None, notice.session) and notice.tenant == self.tenant
        if self.ended or not wanted:
            return
        if len(self._unread) >= _UNREAD:
            self._unread.clear()
            self.end()
            return
        self._unread.append(notice)
        if self._session is not None and notice.name == DELETED:
            self.end()
        self._changed.set()

    def end(self) -> None:
        """Let the reader come to the end of what is unread."""
        self.ended = True
        self._changed.set()


class Feed:
    """Publishes notices to subscriptions, a bounded number of them.

    What happens through another gateway is seen if both have a relay; that is best effort.
    """

    def __init__(
        self, sessions: SessionManager, limits: ServiceLimits, relay: Relay | None = None
    ) -> None:
        self._sessions = sessions
        self._limits = limits
        self._relay = relay
        self.subscriptions: set[Subscription] = set()
        self._closing = False

    def start(self) -> None:
        """Listen to other gateways."""
        if self._relay is not None:
            self._relay.start(self._receive)

    def end(self) -> None:
        """End all subscriptions, and accept none: the service is about to stop."""
        self._closing = True
        for subscription in self.subscriptions:
            subscription.end()

    async def stop(self) -> None:
        """End all subscriptions and stop listening."""
        self.end()
        if self._relay is not None:
            await self._relay.stop()

    def subscribe(self, tenant: str, session: str | None = None) -> Subscription:
        """Begin a subscription. Raises Overloaded for one too many, of all or of the tenant's share.

        Raises ShuttingDown as well.
        """
        wait = self._limits.retry_after_seconds
        if self._closing:
            raise ShuttingDown("the service is shutting down; connect again", wait)
        if not self._has_room(tenant):
            raise Overloaded(
                f"{len(self.subscriptions)} streams of events are open, which is the limit, or "
                "leaves this tenant no more of them; close some, or raise max_streams",
                wait,
            )
        subscription = Subscription(self, tenant, session)
        self.subscriptions.add(subscription)
        return subscription

    def _has_room(self, tenant: str) -> bool:
        limits = self._limits
        held = sum(each.tenant == tenant for each in self.subscriptions)
        return has_room(
            held,
            len(self.subscriptions),
            limits.max_streams,
            limits.tenant_share,
            limits.get_weight(tenant),
        )

    def remove(self, subscription: Subscription) -> None:
        """Forget a subscription that is closed."""
        self.subscriptions.discard(subscription)

    def observe(self, event: ServiceEvent) -> None:
        """Publish an event of this process."""
        for notice in to_notices(event, self._get_tenant):
            self._publish(notice)
            if self._relay is not None:
                self._relay.publish(notice)

    def _receive(self, notice: Notice) -> None:
        self._publish(notice)

    def _publish(self, notice: Notice) -> None:
        for subscription in tuple(self.subscriptions):
            subscription.offer(notice)

    def _get_tenant(self, session: str) -> str | None:
        live = self._sessions.find(session)
        return None if live is None else live.tenant
