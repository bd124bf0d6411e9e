"""Requests by the OpenAPI description: valid ones, and ones that break it in one place."""

from collections.abc import Mapping
from typing import Any

import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import GenerationMode

# `from_dict` would import it in the thread of a door. Where two threads parse modules at once, Python 3.11 may fail
# with "AST constructor recursion depth mismatch".
from schemathesis.specs.openapi.schemas import OpenApiSchema

from benchmarks.fuzz.requests import Request

DOOR = "openapi"
# They end when the client goes.
ENDLESS = ("/v1/stream", "/v1/sessions/{session}/stream")
# Ids that there are, for half of the path parameters.
_PARAMETERS: Mapping[str, str] = {
    "session": "@session:0",
    "response": "@response:0",
    "conversation": "@conversation:0",
    "item": "@item:0",
}
# The client that sends the request adds these headers itself.
_NOT_SENT = frozenset({"user-agent", "accept-encoding", "connection", "content-length", "host"})


def openapi_requests(description: Mapping[str, Any], url: str) -> st.SearchStrategy[Request]:
    """Return requests of all operations of a description."""
    schema: OpenApiSchema = schemathesis.openapi.from_dict(dict(description))
    cases = []
    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]
        if operation.path not in ENDLESS:
            cases += [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
    return st.tuples(st.one_of(cases), st.booleans()).map(lambda pair: _to_request(*pair, url))


def _to_request(case: Any, known: bool, url: str) -> Request:
    references = {
        name: _PARAMETERS[name] for name in case.path_parameters or {} if name in _PARAMETERS
    }
    if known:
        case.path_parameters.update(references)
    kwargs = case.as_transport_kwargs(base_url=url)
    kwargs.pop("verify", None), kwargs.pop("cert", None), kwargs.pop("timeout", None)
    prepared = requests.Request(**kwargs).prepare()
    body: Any = prepared.body or b""
    data = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    headers = tuple(
        (name.lower(), value if isinstance(value, str) else value.decode("latin-1"))
        for name, value in prepared.headers.items()
        if name.lower() not in _NOT_SENT
    )
    path = str(prepared.path_url).replace("%40", "@").replace("%3A", ":")
    return Request(DOOR, str(prepared.method), path, headers, data)
