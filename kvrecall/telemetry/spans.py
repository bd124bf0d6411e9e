"""Spans of traces: the span that work runs under, and new ones below it or linked to it.

Imports no tracing library. Where nobody traces, the current span is one that does nothing.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, Protocol

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client"]
NO_ATTRIBUTES: Attributes = {}


@dataclass(frozen=True)
class Moment:
    """Something that happened at a time, in seconds since the epoch, within a span."""

    name: str
    at: float
    attributes: Attributes = field(default_factory=dict)


class Span(Protocol):
    """A piece of work in a trace. `trace_id` is 32 hexadecimal digits; empty without a trace."""

    @property
    def trace_id(self) -> str:
        """Id of the trace."""
        ...

    def headers(self) -> dict[str, str]:
        """W3C headers by which another process continues the trace below this span."""
        ...

    def child(self, name: str, kind: Kind = "internal") -> "Span":
        """Begin a span below this one."""
        ...

    def follow(self, name: str) -> "Span":
        """Begin a trace of its own, linked to this span: work that this one only caused."""
        ...

    def record(
        self,
        name: str,
        start: float,
        end: float,
        *,
        attributes: Attributes = NO_ATTRIBUTES,
        moments: Sequence[Moment] = (),
        beside: bool = False,
    ) -> None:
        """Add a span that is over, from `start` to `end` in seconds since the epoch.

        It is below this one, or `beside` it: below the caller's span, where the caller sent one.
        """
        ...

    def rename(self, name: str) -> None:
        """Give the span a name that was not known at its beginning."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        ...

    def add(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Add something that happens now."""
        ...

    def end(self, error: str = "") -> None:
        """End the span; `error` is the code of what made it fail, never a message."""
        ...


class Tracer(Protocol):
    """The source of spans in a process."""

    def begin(self, name: str, kind: Kind, headers: Mapping[str, str]) -> Span:
        """Begin the span of a request, below the caller's if `headers` name it."""
        ...

    def close(self, seconds: float) -> None:
        """Export what is left, for at most so many seconds."""
        ...


@dataclass(frozen=True)
class PassedSpan:
    """A span of the caller's that this process hands on without a span of its own."""

    trace_id: str = ""
    passed: Mapping[str, str] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        """Return what the caller sent."""
        return dict(self.passed)

    def child(self, name: str, kind: Kind = "internal") -> "PassedSpan":
        """Return the same span."""
        return self

    def follow(self, name: str) -> "PassedSpan":
        """Return the same span: log lines of what it caused have its id."""
        return self

    def record(
        self,
        name: str,
        start: float,
        end: float,
        *,
        attributes: Attributes = NO_ATTRIBUTES,
        moments: Sequence[Moment] = (),
        beside: bool = False,
    ) -> None:
        """Do nothing."""

    def rename(self, name: str) -> None:
        """Do nothing."""

    def set(self, attributes: Attributes) -> None:
        """Do nothing."""

    def add(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Do nothing."""

    def end(self, error: str = "") -> None:
        """Do nothing."""


NO_SPAN = PassedSpan()
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def current_span() -> Span:
    """Return the span that the running code works under."""
    return _current.get()


def enter(span: Span) -> None:
    """Make `span` the current one for the rest of the current task, or of its context."""
    _current.set(span)


@contextmanager
def using(span: Span) -> Iterator[Span]:
    """Make `span` the current one in the block; the caller ends it."""
    token = _current.set(span)
    try:
        yield span
    finally:
        _current.reset(token)


@contextmanager
def under(span: Span) -> Iterator[Span]:
    """Make `span` the current one in the block, and end it with the block.

    An exception ends it with the error's code, or its type, and is raised on.
    """
    error = ""
    try:
        with using(span):
            yield span
    except BaseException as raised:
        error = get_error_code(raised)
        raise
    finally:
        span.end(error)


@contextmanager
def span(name: str) -> Iterator[Span]:
    """Run the block under a new span below the current one."""
    above = _current.get()
    if above is NO_SPAN:  # nobody traces, as for most of the calls of most processes
        yield NO_SPAN
        return
    with under(above.child(name)) as new:
        yield new


def get_error_code(error: BaseException) -> str:
    """Return the stable code of an error, or its type; its message may quote a request."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    code = getattr(error, "code", None)
    return str(code) if isinstance(code, str) else type(error).__name__
