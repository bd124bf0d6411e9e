"""Bodies as JSON: strict, parsed once, and large ones on threads of their own."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import Scope

from kvrecall.domain.tolerance.surrogates import replace_in_json
from kvrecall.sandbox.tenant_threads import TenantThreads

# A smaller body is parsed within a millisecond, and should not wait for a thread.
_PARSED_AT_ONCE_BYTES = 64 << 10
RouteHandler = Callable[[Request], Coroutine[Any, Any, Response]]
# A number that may be beyond a double, where a value may begin: identifiers have such digits, too.
_MAYBE_INFINITE = re.compile(rb"(?:^|[\[:,\s])-?(?:\d[\d.]*[eE]\+?\d{3}|\d{309})")
_PARSED = "kvrecall.json"
_MENDED = "kvrecall.mended"


@dataclass(frozen=True)
class ParsedBody:
    """A body's bytes, its value, and whether lone surrogates were replaced in both."""

    content: bytes
    value: Any
    mended: bool = False


class BodyParser:
    """Parses bodies, so that large ones stop no other request, and one tenant's no other tenant's.

    A thread holds the interpreter while it parses: a body's number of values is bounded before.
    """

    def __init__(self, mends: bool, threads: TenantThreads) -> None:
        """Parse strictly; `mends`: replace lone surrogates."""
        self._mends = mends
        self._threads = threads

    async def parse(self, scope: Scope, tenant: str, content: bytes) -> bytes:
        """Parse a tenant's body and keep its value for the request. Returns its bytes.

        What is not JSON by its type is not parsed. Raises ValueError, and QueueFull where as many
        large bodies of the tenant wait as may.
        """
        if not content or not _is_json(Headers(scope=scope)):
            return content
        work = partial(parse_strictly, content, self._mends)
        if len(content) <= _PARSED_AT_ONCE_BYTES:
            parsed = work()
        else:
            parsed = await asyncio.wrap_future(self._threads.submit(tenant, work))
        scope[_PARSED] = parsed.value
        if parsed.mended:
            scope[_MENDED] = True
        return parsed.content


class ParsedRequest(Request):
    """A request whose body was parsed when it was received."""

    async def json(self) -> Any:
        """Return the body's value."""
        if _PARSED not in self.scope:
            await self.body()
        return self.scope[_PARSED] if _PARSED in self.scope else await super().json()


class ParsedRoute(APIRoute):
    """A route that takes its body as it was parsed when it was received."""

    def get_route_handler(self) -> RouteHandler:
        """Return the route's handler with a request that knows its value."""
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(ParsedRequest(request.scope, request.receive))

        return handle_parsed


def parse_strictly(content: bytes, mends: bool) -> ParsedBody:
    """Parse JSON that catalog and protobuf can represent: finite numbers, no lone surrogates.

    With `mends` the latter are replaced. Raises ValueError.
    """
    try:
        return ParsedBody(content, _parse_finite(content))
    except ValueError:
        mended = _replace_surrogates(content) if mends else content
        if mended == content:
            raise
        return ParsedBody(mended, _parse_finite(mended), mended=True)


def _parse_finite(content: bytes) -> Any:
    """Parse JSON without NaN and without numbers beyond a double, which no answer could repeat."""
    value = from_json(content, allow_inf_nan=False)
    if _MAYBE_INFINITE.search(content):
        json.dumps(value, allow_nan=False)  # raises for a number that became infinite
    return value


def is_mended(scope: Scope) -> bool:
    """Return whether lone surrogates were replaced in the body of a request."""
    return _MENDED in scope


def _replace_surrogates(content: bytes) -> bytes:
    try:
        return replace_in_json(content.decode()).encode()
    except UnicodeDecodeError:
        return content


def _is_json(headers: Headers) -> bool:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")
