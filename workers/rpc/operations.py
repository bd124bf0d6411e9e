"""A worker's HTTP port for operators: its metrics, and probes of life and readiness."""

import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from kvrecall.metrics.page import MetricsPage
from workers.errors import CannotListen

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_READ_SECONDS = 10.0
_TEXT = "text/plain; charset=utf-8"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False  # a scrape that hangs does not keep the worker from its end


class _Handler(WSGIRequestHandler):
    timeout = _READ_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Write no access log: probes and scrapes come every few seconds."""


class OperationsServer:
    """Serves `/metrics`, `/healthz` and `/readyz` on threads of its own.

    `/healthz` answers from the creation on, while the model is loaded; `/readyz` is 503 until
    `ready` is true. Raises CannotListen.
    """

    def __init__(self, listen: str, page: MetricsPage) -> None:
        """`listen`: HOST:PORT, port 0 for any free one; the address is bound here."""
        host, _, port = listen.rpartition(":")
        self._page = page
        self.ready: Callable[[], bool] = lambda: False
        try:
            self._server = make_server(host.strip("[]"), int(port), self._answer, _Server, _Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise CannotListen(
                f"cannot listen on {listen} for operators: {error}; choose another --ops"
            ) from error
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="operations", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(
        self, environment: "WSGIEnvironment", start_response: "StartResponse"
    ) -> Iterable[bytes]:
        """Answer a request, as WSGI has it."""
        status, content_type, body = self._respond(
            environment["REQUEST_METHOD"],
            environment.get("PATH_INFO", ""),
            environment.get("HTTP_ACCEPT", ""),
        )
        headers = [("content-type", content_type), ("content-length", str(len(body)))]
        start_response(status, headers)
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [body]

    def _respond(self, method: str, path: str, accept: str) -> tuple[str, str, bytes]:
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", _TEXT, b"only GET is answered here\n"
        match path:
            case "/metrics":
                return "200 OK", *self._page.render(accept)
            case "/healthz":
                return "200 OK", _TEXT, b"alive\n"
            case "/readyz" if self.ready():
                return "200 OK", _TEXT, b"ready\n"
            case "/readyz":
                return "503 Service Unavailable", _TEXT, b"the worker takes no sessions now\n"
        return "404 Not Found", _TEXT, b"there are /metrics, /healthz and /readyz\n"
