"""Servers over tiny models of four kinds, one after the other, and what undisturbed sessions say."""

from collections.abc import Callable, Iterator
from functools import cache, partial
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
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model."""
    return save(KINDS[kind], tmp_path_factory.mktemp("model") / kind)


# Other tests of the session have servers of another model, by the fixtures that are called here.
@pytest.fixture(scope="session")
def new_server(new_server: Callable[..., Server], folder: Path) -> Callable[..., Server]:
    """Makes servers of the model, not started; keywords: environment."""
    return partial(new_server, KVRECALL_MODEL=str(folder))


@pytest.fixture(scope="session")
def new_cluster(new_cluster: Callable[..., Cluster], folder: Path) -> Callable[..., Cluster]:
    """Makes empty clusters of the model, not started; keywords: environment of all processes."""
    return partial(new_cluster, KVRECALL_MODEL=str(folder))


@pytest.fixture(scope="session")
def server(new_server: Callable[..., Server]) -> Iterator[Server]:
    """A server of the model, which tests kill and start again."""
    server = new_server()
    server.start()
    yield server
    server.kill()


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
