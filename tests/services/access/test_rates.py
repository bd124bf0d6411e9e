"""Rates: what a minute admits, of requests and of tokens, alone and over a shared storage."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from limits.aio.storage import MemoryStorage, Storage
from limits.errors import StorageError

from kvrecall.domain.errors import RateLimited
from kvrecall.domain.events import GrammarCompiled, TokensComputed
from kvrecall_server.app.rates import build_redis_storage
from services.access import rates as module
from services.access.principals import Principal, acting_as
from services.access.rates import Rates, build_token_window
from services.access.settings import AccessSettings

ANN = Principal("ann", key="k1")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The Unix time of rates, as one number to be changed; a minute begins at it."""
    now = [time.time() // 60 * 60]
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now[0]))
    return now


@pytest.fixture(params=["memory", "redis", "cluster"])
def new_storage(request: pytest.FixtureRequest) -> Callable[[], Storage]:
    """new_storage(): a storage with the same counters at each call."""
    if request.param == "memory":
        shared = MemoryStorage()
        return lambda: shared
    url = request.getfixturevalue("redis_url" if request.param == "redis" else "redis_cluster_url")
    prefix = uuid4().hex
    return lambda: build_redis_storage(url, prefix)


async def charge(rates: Rates, principal: Principal, tokens: int) -> None:
    with acting_as(principal):
        rates.observe(TokensComputed("s", tokens - 1, 1, 0, 0))
    await rates.stop()


async def test_gateways_share_the_window_of_requests(new_storage: Any) -> None:
    settings = AccessSettings(key_requests_per_minute=3, tenant_requests_per_minute=5)
    one, other = (Rates(new_storage(), settings) for _ in range(2))
    left = [(await each.admit(ANN, False)).requests for each in (one, other, one)]
    assert [(window.limit, window.remaining) for window in left if window] == [
        (3, 2),
        (3, 1),
        (3, 0),
    ]
    for each in (one, other):
        with pytest.raises(RateLimited) as caught:
            await each.admit(ANN, False)
        assert 0 < caught.value.retry_after_seconds <= 60
    second = Principal("ann", key="k2")
    for _ in range(2):
        await other.admit(second, False)
    with pytest.raises(RateLimited, match="5 requests"):  # the tenant's, over its two keys
        await one.admit(second, False)
    assert await one.admit(Principal("ben", key="k3"), False)
    assert (await one.admit(Principal("ben"), False)).requests is not None


async def test_gateways_share_the_window_of_tokens(new_storage: Any) -> None:
    settings = AccessSettings(tenant_tokens_per_minute=1000, key_tokens_per_minute=100)
    one, other = (Rates(new_storage(), settings) for _ in range(2))
    report = await one.admit(ANN, True)
    assert report.requests is None
    assert report.tokens is not None
    assert report.tokens.remaining == 100
    await charge(one, ANN, 40)
    report = await other.admit(ANN, True)
    assert report.tokens is not None
    assert report.tokens.remaining == 60
    await charge(other, ANN, 500)  # the turn that fills the window counts as a whole
    for each in (one, other):
        with pytest.raises(RateLimited, match="100 tokens"):
            await each.admit(ANN, True)
        assert (await each.admit(ANN, False)).tokens is not None  # what computes nothing goes on
    second = Principal("ann", key="k2")
    assert await one.admit(second, True)
    await charge(one, second, 460)
    with pytest.raises(RateLimited, match="1000 tokens"):
        await other.admit(Principal("ann", key="k3"), True)
    assert await other.admit(Principal("ben", key="k4"), True)


async def test_tokens_leave_the_window_with_time(clock: list[float]) -> None:
    rates = Rates(MemoryStorage(), AccessSettings(tenant_tokens_per_minute=100))
    await charge(rates, ANN, 200)
    waited = 0.0
    for _ in range(3):
        try:
            await rates.admit(ANN, True)
            break
        except RateLimited as error:
            clock[0] += error.retry_after_seconds
            waited += error.retry_after_seconds
    assert 85 < waited < 95  # half of the minute after must pass until 200 count as 100


@pytest.mark.parametrize(
    ("before", "current", "second", "remaining", "reset"),
    [
        (0, 0, 10.0, 100, 50.0),
        (100, 0, 30.0, 50, 30.0),
        (100, 40, 30.0, 10, 90.0),
        (100, 60, 30.0, 0, 6.6),
        (0, 100, 45.0, 0, 15.6),
        (0, 200, 45.0, 0, 45.3),
        (200, 100, 59.0, 0, 1.6),
    ],
)
def test_a_window_of_tokens_weighs_the_minute_before(
    before: int, current: int, second: float, remaining: int, reset: float
) -> None:
    window = build_token_window(100, before, current, second)
    assert (window.limit, window.remaining) == (100, remaining)
    assert window.reset_seconds == pytest.approx(reset)


async def test_turns_outside_of_requests_are_charged_to_nobody() -> None:
    rates = Rates(MemoryStorage(), AccessSettings(tenant_tokens_per_minute=100))
    rates.observe(TokensComputed("s", 100, 100, 0, 0))
    await rates.stop()
    report = await rates.admit(Principal(""), True)
    assert report.tokens is not None
    assert report.tokens.remaining == 100


async def test_seconds_of_grammars_are_charged_as_tokens() -> None:
    rates = Rates(MemoryStorage(), AccessSettings(tenant_tokens_per_minute=1500))
    with acting_as(ANN):
        rates.observe(GrammarCompiled(0.7))
    await rates.stop()
    report = await rates.admit(ANN, True)
    assert report.tokens is not None
    assert report.tokens.remaining == 800
    with acting_as(ANN):
        rates.observe(GrammarCompiled(1.0))
    await rates.stop()
    with pytest.raises(RateLimited, match="1500 tokens"):
        await rates.admit(ANN, True)


async def test_a_storage_that_fails_refuses_nothing() -> None:
    class Failing(MemoryStorage):
        async def incr(self, *_: Any, **__: Any) -> int:
            raise StorageError(OSError("down"))

        get = acquire_entry = incr  # type: ignore[assignment]

    rates = Rates(
        Failing(), AccessSettings(tenant_tokens_per_minute=1, tenant_requests_per_minute=1)
    )
    await charge(rates, ANN, 50)
    for _ in range(3):
        assert (await rates.admit(ANN, True)).requests is None
