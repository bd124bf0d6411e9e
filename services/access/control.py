"""Access control: one call that every protocol makes before it serves a request."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrecall.domain.events import ServiceEvent
from services.access.authenticator import AccessPolicy, Authenticator
from services.access.principals import Credentials, Principal, Scope
from services.access.rates import RateReport, Rates
from services.catalog.api_keys import ApiKeys

OPEN = AccessPolicy()
# A catalog's answer is waited for so long by what must be served without it.
_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class Admitted:
    """A request that may be served: its sender, and what is left of the sender's rates."""

    principal: Principal
    rates: RateReport


class AccessControl:
    """Keys, scopes and rates. Without `rates` there are no limits."""

    def __init__(
        self, keys: ApiKeys, policy: AccessPolicy = OPEN, rates: Rates | None = None
    ) -> None:
        self._authenticator = Authenticator(keys, policy)
        self._rates = rates

    async def admit(
        self,
        credentials: Credentials,
        scopes: Iterable[Scope],
        *,
        computes: bool = False,
        monitors: bool = False,
    ) -> Admitted:
        """Admit a request that needs one of the scopes; `computes`: it takes tokens of a model.

        One that `monitors` is served while the catalog is away: what that said last of its key counts
        then, and it has no rates.
        The caller serves it under `acting_as(principal)`, to whom its tokens are charged. Raises
        Unauthenticated, InsufficientScope, RateLimited, InvalidRequest, CatalogError.
        """
        patience = _PATIENCE_SECONDS if monitors else None
        principal = await self._authenticator.authenticate(credentials, patience)
        principal.require(scopes)
        if self._rates is None or monitors:
            return Admitted(principal, RateReport())
        return Admitted(principal, await self._rates.admit(principal, computes))

    def observe(self, event: ServiceEvent) -> None:
        """Charge the tokens of a turn."""
        if self._rates is not None:
            self._rates.observe(event)

    async def stop(self) -> None:
        """Finish what runs in the background."""
        await self._authenticator.stop()
        if self._rates is not None:
            await self._rates.stop()
