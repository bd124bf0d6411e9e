"""Servers over tiny models of four kinds, one after the other, and what undisturbed sessions say."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.models.conversation import (
    METHODS,
    RECALLING,
    Begin,
    Conversation,
    Undisturbed,
)
from tests.end_to_end.models.kinds import KINDS, save
from tests.end_to_end.servers import Cluster, Json, Server

TURNS = 4


@pytest.fixture(scope="session", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """What the layers of the served model keep."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model."""
    return save(KINDS[kind], tmp_path_factory.mktemp("model") / kind)


@pytest.fixture(scope="session")
def server(new_server: Callable[..., Server]) -> Server:
    """A server of the model, which tests kill and start again."""
    server = new_server()
    server.start()
    return server


@pytest.fixture(params=list(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    """Name of a session's settings."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def begin(say: Any) -> Begin:
    """begin(server, method, turns): a session that shares nothing with others, and its first turns."""

    def start(server: Server | Cluster, method: str = RECALLING, turns: int = 0) -> Conversation:
        return Conversation.begin(server, say, METHODS[method]).until(turns)

    return start


@pytest.fixture(scope="session")
def undisturbed(server: Server, begin: Begin) -> Undisturbed:
    """undisturbed(method): the answers of a session that nothing happens to."""

    @cache
    def hear(method: str = RECALLING) -> tuple[Json, ...]:
        return begin(server, method, TURNS).answers

    return hear
