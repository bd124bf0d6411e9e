"""Clients of the application over a stub worker, served on a local port."""

import importlib.util
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from kvrecall import AsyncKvrecallClient, KvrecallClient


def _load_gateway_fixtures() -> ModuleType:
    """Load the fixtures of the gateway's tests by path; test folders are no packages."""
    path = Path(__file__).parents[2] / "gateway" / "conftest.py"
    spec = importlib.util.spec_from_file_location("gateway_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fixtures = _load_gateway_fixtures()
plain_logs = _fixtures.plain_logs
live_url = _fixtures.live_url


@pytest.fixture
def client(live_url: str) -> Iterator[KvrecallClient]:
    """Blocking client of the served application."""
    with KvrecallClient(live_url) as client:
        yield client


@pytest.fixture
async def async_client(live_url: str) -> AsyncIterator[AsyncKvrecallClient]:
    """Async client of the served application."""
    async with AsyncKvrecallClient(live_url) as client:
        yield client


class FlakyTransport(httpx.HTTPTransport):
    """Transport to the real server that fails `failures` times, after the request was served."""

    def __init__(self, failures: int, response: Callable[[], httpx.Response] | None) -> None:
        super().__init__()
        self.failures = failures
        self.requests: list[httpx.Request] = []
        self._response = response

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        response = super().handle_request(request)
        if len(self.requests) > self.failures:
            return response
        response.read()
        response.close()
        if self._response is None:
            raise httpx.ReadError("connection reset")
        return self._response()


class AsyncFlakyTransport(httpx.AsyncHTTPTransport):
    """FlakyTransport of the async client."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        response = await super().handle_async_request(request)
        if len(self.requests) > self.failures:
            return response
        await response.aread()
        await response.aclose()
        raise httpx.ReadError("connection reset")


@pytest.fixture
def flaky_transport() -> Callable[..., FlakyTransport]:
    """Build a transport whose first responses are lost, or replaced by `response`."""

    def build(
        failures: int, response: Callable[[], httpx.Response] | None = None
    ) -> FlakyTransport:
        return FlakyTransport(failures, response)

    return build


@pytest.fixture
def async_flaky_transport() -> Callable[[int], AsyncFlakyTransport]:
    """Build an async transport whose first responses are lost."""
    return AsyncFlakyTransport
