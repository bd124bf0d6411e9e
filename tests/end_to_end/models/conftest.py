"""Servers over tiny models of four kinds, one after the other, and what undisturbed sessions say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.models.conversation import Conversation
from tests.end_to_end.models.kinds import KINDS, save
from tests.end_to_end.servers import Json, Server

METHODS: dict[str, Json] = {
    "recalling": {},
    "bounded": {"method": "snapkv", "budget": 128, "repair_rows": 32},
}
"""Settings of sessions: the service's own, and a method that evicts for good."""
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


@pytest.fixture(scope="session", params=list(METHODS))
def method(request: pytest.FixtureRequest) -> Json:
    """Settings of a session."""
    return METHODS[request.param]


@pytest.fixture(scope="session")
def begin(say: Any) -> Callable[..., Conversation]:
    """begin(server, settings, turns): a session that shares nothing with others, and its first turns."""

    def start(server: Any, settings: Json | None = None, turns: int = 0) -> Conversation:
        return Conversation.begin(server, say, settings or {}).until(turns)

    return start


@pytest.fixture(scope="session")
def undisturbed(server: Server, method: Json, begin: Callable[..., Conversation]) -> list[Json]:
    """Answers of a session that nothing happens to."""
    return begin(server, method, TURNS).answers


@pytest.fixture(scope="session")
def recalled(server: Server, begin: Callable[..., Conversation]) -> list[Json]:
    """The same of a session of the service's own settings."""
    return begin(server, {}, TURNS).answers
