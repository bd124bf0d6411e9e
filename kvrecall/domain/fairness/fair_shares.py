"""Whose turn it is: among tenants by weighted tokens, among the flows of a tenant by tokens."""

from collections.abc import Iterable

from kvrecall.domain.fairness.share import Share
from kvrecall.domain.fairness.virtual_times import VirtualTimes

Rank = tuple[bool, float, float]


class FairShares:
    """Orders work by the service that its tenant has had, then by that of its flow.

    Work that is waiting or running is entered, and leaves at its end. Not thread-safe.
    """

    def __init__(self) -> None:
        self._tenants = VirtualTimes()
        self._flows: dict[str, VirtualTimes] = {}

    def enter(self, share: Share) -> None:
        """Add a piece of work."""
        self._tenants.enter(share.tenant)
        self._flows.setdefault(share.tenant, VirtualTimes()).enter(share.flow)

    def leave(self, share: Share) -> None:
        """Remove a piece of work that was entered."""
        self._tenants.leave(share.tenant)
        flows = self._flows[share.tenant]
        flows.leave(share.flow)
        if not flows:
            del self._flows[share.tenant]

    def charge(self, costs: Iterable[tuple[Share, float]]) -> None:
        """Charge what was served at once, in prefilled tokens; work that has left costs nothing."""
        served = list(costs)
        self._tenants.charge((share.tenant, cost / share.weight) for share, cost in served)
        for share, cost in served:
            if (flows := self._flows.get(share.tenant)) is not None:
                flows.charge([(share.flow, cost)])

    def served(self, share: Share) -> float:
        """Virtual time of the work's tenant, in tokens over its weight."""
        return self._tenants[share.tenant]

    def rank(self, share: Share) -> Rank:
        """Rank work: the smallest is next, background work after all other."""
        flows = self._flows.get(share.tenant)
        flow = 0.0 if flows is None else flows[share.flow]
        return share.background, self._tenants[share.tenant], flow
