"""Servers for the end-to-end tests, in processes of their own on free ports of this machine.

Either `kvrecall serve`, with all in one process, or a gateway and two workers on one Redis.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from kvrecall.client import KvrecallClient
from reference import MODEL_PATH
from tests.end_to_end.servers import (
    SMALL_LIMITS,
    Cluster,
    Json,
    Process,
    Server,
    until,
)
from tests.research import nest_research


def chatter(seed: int, sentences: int) -> str:
    """Generated text of `sentences` sentences with about 14 tokens each."""
    rng = random.Random(seed)
    names = ("Ada", "Ben", "Clara", "David", "Emma", "Frank")
    things = ("locker", "garage", "office", "garden")
    templates = (
        "The code of {name}'s {thing} is {code}.",
        "{name} called about the {thing} again today.",
        "By the way, the {thing} of {name} has number {code}.",
        "I think that {name} will be late, the {thing} is closed.",
    )
    return " ".join(
        rng.choice(templates).format(
            name=rng.choice(names), thing=rng.choice(things), code=rng.randrange(1000, 10000)
        )
        for _ in range(sentences)
    )


def user(text: str) -> Json:
    """A user's message."""
    return {"role": "user", "content": text}


def asks(call: str, **arguments: str) -> Json:
    """A recorded assistant message that calls a tool; like a generated one, it starts a pause."""
    function = {"name": "look_up", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call, "function": function}],
    }


def is_idle(client: KvrecallClient, session: str) -> bool:
    """True if the session is idle."""
    return client.get_session(session).state == "idle"


@pytest.fixture(scope="session")
def say() -> SimpleNamespace:
    """Functions that make messages and wait for conditions."""
    return SimpleNamespace(chatter=chatter, user=user, asks=asks, until=until, is_idle=is_idle)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model without its end-of-turn token: replies are as long as max_tokens.

    The turns that these tests interrupt must be long.
    """
    folder = tmp_path_factory.mktemp("model") / "endless"
    shutil.copytree(MODEL_PATH, folder)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(
            json.dumps(config | {"eos_token_id": config["pad_token_id"]}), encoding="utf-8"
        )
    return folder


@pytest.fixture(scope="session")
def command() -> type[Process]:
    """Class of a process of a kvrecall command; the test ends it."""
    return Process


@pytest.fixture(scope="session")
def new_server(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Makes servers over empty data directories, not started; keywords: environment."""
    made: list[Server] = []

    def make(**environment: str) -> Server:
        made.append(
            Server(tmp_path_factory.mktemp("server"), {"KVRECALL_MODEL": str(model), **environment})
        )
        return made[-1]

    yield make
    for server in made:
        server.kill()


@pytest.fixture(scope="session")
def new_cluster(
    model: Path, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[Callable[..., Cluster]]:
    """Makes empty clusters, not started; keywords: environment of all processes."""
    made: list[Cluster] = []

    def make(**environment: str) -> Cluster:
        shared = {
            "KVRECALL_MODEL": str(model),
            "KVRECALL_CATALOG_URL": redis_url,
            "KVRECALL_STORE__REDIS_URL": redis_url,
            "KVRECALL_STORE__REDIS_NAMESPACE": uuid4().hex,
        }
        made.append(Cluster(tmp_path_factory.mktemp("cluster"), shared | environment))
        return made[-1]

    yield make
    for cluster in made:
        cluster.kill()


@pytest.fixture(scope="session")
def shared_server(new_server: Callable[..., Server]) -> Server:
    """One process, shared by the tests."""
    server = new_server(**SMALL_LIMITS)
    server.start()
    return server


@pytest.fixture(scope="session")
def shared_cluster(new_cluster: Callable[..., Cluster]) -> Cluster:
    """Two workers on Redis, shared by the tests."""
    cluster = new_cluster(**SMALL_LIMITS)
    cluster.start()
    return cluster


@pytest.fixture(scope="session", params=["one process", "two workers on Redis"])
def server(request: pytest.FixtureRequest) -> Server | Cluster:
    """The shared servers, with small limits; each test runs with both."""
    # Requested, not made here: it would be started again after each test with the other one.
    name = "shared_server" if request.param == "one process" else "shared_cluster"
    return cast("Server | Cluster", request.getfixturevalue(name))


@pytest.fixture
def client(server: Server | Cluster) -> KvrecallClient:
    """A client of the shared server."""
    return server.own


@pytest.fixture
def new_session(client: KvrecallClient) -> Callable[..., str]:
    """Creates sessions of the shared server: small budget, greedy, with repair rows."""

    def make(**settings: Any) -> str:
        common = {"budget": 128, "method": "snapkv", "repair_rows": 32, "seed": 7}
        return client.create_session(**nest_research({**common, **settings})).id

    return make


@pytest.fixture(scope="module")
def live_url(server: Server | Cluster) -> str:
    """Address of the shared server, by the name that the OpenAPI tests use."""
    return server.url
