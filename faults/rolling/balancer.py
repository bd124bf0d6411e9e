"""A load balancer in front of the gateways, as a transport of the client library."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx

from faults.rolling.tally import ANSWERED, Tally

# Of `/readyz`: a gateway that drains says so for this long before it stops listening.
PROBE_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 2.0


@dataclass
class Balancer:
    """Sends requests to the gateways in turn that answered the last probe of `/readyz`.

    As common balancers do it sends a request to the next gateway where no connection is made, and
    repeats nothing that was sent. `ready`: the answers to the last probes, by address.
    """

    urls: Sequence[str]
    tally: Tally
    ready: dict[str, bool] = field(default_factory=dict)
    _turn: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _probes: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._probes = [threading.Thread(target=self._probe, args=(url,)) for url in self.urls]
        for probe in self._probes:
            probe.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for probe in self._probes:
            probe.join()

    def pick(self) -> list[str]:
        """Addresses of the gateways that are ready, the next one first."""
        self._turn += 1
        ready = [url for url in self.urls if self.ready.get(url, True)]
        first = self._turn % len(ready) if ready else 0
        return ready[first:] + ready[:first]

    def _probe(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=PROBE_TIMEOUT_SECONDS) as client:
            while not self._over.wait(PROBE_SECONDS):
                answered = False
                with suppress(httpx.TransportError):
                    answered = client.get("/readyz").is_success
                self.ready[url] = answered


class BalancedTransport(httpx.BaseTransport):
    """Connections of one client through a balancer; counts every response in the tally."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._connections = httpx.HTTPTransport()

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to a gateway that is ready. Raises httpx.TransportError."""
        key = request.headers.get("Idempotency-Key", "")
        try:
            response = self._send(request)
        except httpx.TransportError:
            self._balancer.tally.respond(key, time.monotonic(), "connection_failed")
            raise
        text = describe_error(response) if response.is_error else ANSWERED
        self._balancer.tally.respond(key, time.monotonic(), text)
        return response

    def _send(self, request: httpx.Request) -> httpx.Response:
        refused = httpx.ConnectError("no gateway is ready", request=request)
        for url in self._balancer.pick():
            target = httpx.URL(url)
            request.url = request.url.copy_with(host=target.host, port=target.port)
            request.headers["Host"] = target.netloc.decode()
            try:
                return self._connections.handle_request(request)
            except httpx.ConnectError as error:
                refused = error
        raise refused


def describe_error(response: httpx.Response) -> str:
    """Describe an error by its status and code; it says so if a 503 names no time to try again."""
    response.read()
    try:
        code = response.json().get("code", "no code")
    except ValueError:
        code = "no problem document"
    silent = response.status_code == 503 and "Retry-After" not in response.headers
    return f"{response.status_code} {code}{', without Retry-After' if silent else ''}"
