"""A plugin for pytest under which llama.cpp's server tests run against another server.

It imports nothing of kvrecall. It does for each request what llama.cpp's server does by itself: a
path without /v1 is found, a request without a model gets the only one, and one without a length the
server's (`n_predict` of the tests' presets).
"""

from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests

MODEL = "tinyllama-2"
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_N_PREDICT = 64
_BARE = ("/chat/completions", "/completions", "/models", "/responses", "/messages")
_LENGTH_OF = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
_NAMED = (*_LENGTH_OF, "/v1/messages/count_tokens", "/v1/responses/input_tokens")
_send = requests.Session.request


def pytest_configure() -> None:
    """Let every request of the tests pass through the shim."""

    def send(session: requests.Session, method: str, url: str, **options: Any) -> Any:
        parts = urlsplit(url)
        path = f"/v1{parts.path}" if parts.path.startswith(_BARE) else parts.path
        body = options.get("json")
        if isinstance(body, dict) and path in _NAMED:
            options["json"] = {"model": MODEL, **_get_length(path, body), **body}
        return _send(session, method, urlunsplit(parts._replace(path=path)), **options)

    vars(requests.api)["sessions"].Session.request = send


def _get_length(path: str, body: dict[str, Any]) -> dict[str, int]:
    name = _LENGTH_OF.get(path)
    if name is None or any(each in body for each in _LENGTHS):
        return {}
    return {name: _N_PREDICT}
