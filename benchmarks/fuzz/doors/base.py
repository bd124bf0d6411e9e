"""A door: what is sent to it, how, and how its replies are checked."""

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from benchmarks.fuzz.findings import Problem
from benchmarks.fuzz.requests import Reply, Request


@dataclass(frozen=True)
class Door:
    """A name, requests, and the functions that send one and check its reply."""

    name: str
    requests: st.SearchStrategy[Request]
    send: Callable[[Request], Reply]
    check: Callable[[Request, Reply], list[Problem]]
