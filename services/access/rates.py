"""Rates of keys and tenants: requests, and tokens computed, in a minute.

Gateways that share a storage share the windows. Requests are counted one by one in a moving window.
Tokens are known only after a job, so a window that is not full admits a turn of any size, whose
tokens then count as a whole, however it ended: two counters, of this minute and the one before, stand for the moving
window, as a log of single tokens would be as long as the limit.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
from limits import RateLimitItemPerMinute
from limits.aio.storage import MovingWindowSupport, Storage
from limits.aio.strategies import MovingWindowRateLimiter
from limits.errors import StorageError

from kvrecall.domain.errors import RateLimited
from kvrecall.domain.events import GrammarCompiled, ServiceEvent, TokensComputed
from kvrecall.telemetry.outage import Outage
from services.access.principals import Principal, get_current_principal
from services.access.settings import AccessSettings

_MINUTE = 60
# A CPU second prefills about so many tokens of a small model: a grammar costs as much as it displaces.
_TOKENS_PER_GRAMMAR_SECOND = 1000
_log = structlog.get_logger("kvrecall.rates")


@dataclass(frozen=True)
class Window:
    """What is left of a rate: of `limit` in a minute `remaining`, some more in `reset_seconds`."""

    limit: int
    remaining: int
    reset_seconds: float


@dataclass(frozen=True)
class RateReport:
    """The windows that a request has least left of; None where there is no limit."""

    requests: Window | None = None
    tokens: Window | None = None


@dataclass(frozen=True)
class _Limits:
    """The limits of one kind of holder (key, tenant), None where there is none."""

    requests: int | None
    tokens: int | None


class Rates:
    """Counts requests and tokens, and refuses what is over a limit.

    A storage that fails refuses nothing: rates protect the service, keys protect its data.
    """

    def __init__(self, storage: Storage, settings: AccessSettings) -> None:
        self._storage = storage
        self._moving = _build_moving(storage)
        self._limits: Mapping[str, _Limits] = {
            "key": _Limits(settings.key_requests_per_minute, settings.key_tokens_per_minute),
            "tenant": _Limits(
                settings.tenant_requests_per_minute, settings.tenant_tokens_per_minute
            ),
        }
        self._charges: set[asyncio.Task[None]] = set()
        self._uncounted = Outage(_log, "rates cannot be counted", "rates are counted again")
        self._uncharged = Outage(_log, "tokens cannot be counted", "tokens are counted again")

    async def admit(self, principal: Principal, computes: bool) -> RateReport:
        """Count a request, and return what is left. Raises RateLimited.

        One that `computes` needs some tokens left too.
        """
        try:
            tokens = await self._read_tokens(principal)
            if computes and tokens is not None and tokens.remaining < 1:
                raise _build_refusal("tokens", tokens)
            report = RateReport(await self._count(principal), tokens)
        except StorageError as error:
            self._uncounted.note(type(error.storage_error).__name__)
            return RateReport()
        self._uncounted.end()
        return report

    def observe(self, event: ServiceEvent) -> None:
        """Charge what was computed to the sender of the request that it was computed for.

        That is the request that began a repair, too.
        """
        principal = get_current_principal()
        tokens = _count_tokens(event)
        if tokens and principal is not None:
            task = asyncio.create_task(self._charge(principal, tokens), name="token charge")
            self._charges.add(task)
            task.add_done_callback(self._charges.discard)

    async def stop(self) -> None:
        """Wait until all tokens are charged."""
        if self._charges:
            await asyncio.wait(self._charges)

    async def _count(self, principal: Principal) -> Window | None:
        """Count a request in each window. Raises RateLimited, with the first that is full."""
        windows = []
        for kind, name in _get_holders(principal):
            limit = self._limits[kind].requests
            if limit is not None:
                item = RateLimitItemPerMinute(limit)
                admitted = await self._moving.hit(item, "requests", kind, name)
                stats = await self._moving.get_window_stats(item, "requests", kind, name)
                reset = max(0.0, stats.reset_time - time.time())
                window = Window(limit, max(0, stats.remaining), reset)
                if not admitted:
                    raise _build_refusal("requests", window)
                windows.append(window)
        return _get_tightest(windows)

    async def _read_tokens(self, principal: Principal) -> Window | None:
        windows = []
        for kind, name in _get_holders(principal):
            limit = self._limits[kind].tokens
            if limit is not None:
                minute, second = divmod(time.time(), _MINUTE)
                before, current = await asyncio.gather(
                    self._storage.get(_build_name(kind, name, minute - 1)),
                    self._storage.get(_build_name(kind, name, minute)),
                )
                windows.append(build_token_window(limit, before, current, second))
        return _get_tightest(windows)

    async def _charge(self, principal: Principal, tokens: int) -> None:
        minute = time.time() // _MINUTE
        try:
            for kind, name in _get_holders(principal):
                if self._limits[kind].tokens is not None:
                    counter = _build_name(kind, name, minute)
                    await self._storage.incr(counter, 2 * _MINUTE, amount=tokens)
        except StorageError as error:
            self._uncharged.note(type(error.storage_error).__name__)
        else:
            self._uncharged.end()


def _count_tokens(event: ServiceEvent) -> int:
    """Count the tokens that an event is charged as."""
    match event:
        case TokensComputed():
            return event.total
        case GrammarCompiled(cpu_seconds=seconds):
            return math.ceil(seconds * _TOKENS_PER_GRAMMAR_SECOND)
        case _:
            return 0


def build_token_window(limit: int, before: int, current: int, second: float) -> Window:
    """Build the window from the tokens of the minute before and of this one, `second` into it.

    The minute before counts with the share of it that is less than a minute ago.
    """
    left = _MINUTE - second
    used = current + before * left / _MINUTE
    most = limit - 1  # with which there is one token left
    if used <= most:
        return Window(limit, int(limit - used), left + _MINUTE if current else left)
    if before and (used - most) * _MINUTE / before < left:
        return Window(limit, 0, (used - most) * _MINUTE / before)
    return Window(limit, 0, left + _MINUTE * max(0.0, 1 - most / max(1, current)))


def _build_moving(storage: Storage) -> MovingWindowRateLimiter:
    assert isinstance(storage, MovingWindowSupport), "the storages of kvrecall can all do this"
    return MovingWindowRateLimiter(storage)


def _get_holders(principal: Principal) -> list[tuple[str, str]]:
    """Return the holders of the rates that a request counts for: its key, if any, and its tenant."""
    keys = [("key", principal.key)] if principal.key else []
    return [*keys, ("tenant", principal.tenant)]


def _get_tightest(windows: Sequence[Window]) -> Window | None:
    return min(windows, key=lambda window: window.remaining / window.limit, default=None)


def _build_name(kind: str, name: str, minute: float) -> str:
    return f"tokens/{kind}/{name}/{int(minute)}"


def _build_refusal(what: str, window: Window) -> RateLimited:
    seconds = max(0.001, window.reset_seconds)
    message = f"the limit of {window.limit} {what} a minute is reached; go on in {seconds:.3g} s"
    return RateLimited(message, seconds)
