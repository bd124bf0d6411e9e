"""The services of the compose file: conversations while workers are killed and scaled, and Redis restarts."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kvrecall.client import KvrecallClient, TextDelta
from tests.compose.conversations import begin, hear
from tests.compose.docker import Docker
from tests.compose.stack import Container, Stack
from tests.conftest import until
from tests.end_to_end.servers import DEADLINE_SECONDS


@pytest.fixture
def two_workers(stack: Stack, client: KvrecallClient) -> Iterator[None]:
    """A second worker beside the first, as long as the test runs."""
    scale(stack, client, 2)
    yield
    scale(stack, client, 1)


def scale(stack: Stack, client: KvrecallClient, workers: int) -> None:
    """Run so many workers, and wait until the gateway has just these."""
    stack.scale(workers)
    until(lambda: addresses(client) == names(stack), f"{workers} workers", DEADLINE_SECONDS)


def addresses(client: KvrecallClient) -> set[str]:
    """Addresses of the workers that the gateway reaches."""
    return {worker.address for worker in client.workers() if not worker.draining}


def names(stack: Stack) -> set[str]:
    """Addresses of the workers' containers."""
    return {f"{container.address}:8421" for container in stack.containers("worker")}


def find_owner(stack: Stack, client: KvrecallClient, session: str) -> Container:
    """The container of a session's worker."""
    name = client.get_session(session).worker
    (address,) = [worker.address for worker in client.workers() if worker.name == name]
    (owner,) = [
        container
        for container in stack.containers("worker")
        if f"{container.address}:8421" == address
    ]
    return owner


def test_services_with_a_health_check_are_healthy(stack: Stack) -> None:
    for service in ("redis", "worker", "gateway", "prometheus"):
        (container,) = stack.containers(service)
        assert container.is_healthy, service


def test_containers_run_as_a_user_who_can_write_data_alone(stack: Stack) -> None:
    for service in ("gateway", "worker"):
        (container,) = stack.containers(service)
        assert stack.run_inside(container, "id -u; id -g").split() == ["10001", "10001"]
        for path, answer in (("/opt/kvrecall", "refused"), ("/var/lib/kvrecall", "written")):
            script = f"touch {path}/x 2>/dev/null && echo written || echo refused"
            assert stack.run_inside(container, script) == answer, f"{service}: {path}"
    (gateway,) = stack.containers("gateway")
    find = "python3 -c 'import importlib.util as u; print(u.find_spec(\"torch\"))'"
    assert stack.run_inside(gateway, find) == "None"


def test_a_turn_needs_the_key_of_the_secrets(stack: Stack, client: KvrecallClient) -> None:
    assert begin(client, 1).ask().turn == 2
    refused = httpx.get(f"{stack.url('gateway')}/v1/sessions")
    assert refused.status_code == 401


def test_containers_cannot_write_to_their_images(stack: Stack, docker: Docker) -> None:
    for service in ("redis", "worker", "gateway", "prometheus", "alertmanager"):
        (container,) = stack.containers(service)
        assert not docker.succeeds("exec", container.id, "touch", "/new"), service
        assert docker.succeeds("exec", container.id, "touch", "/tmp/new"), service


@pytest.mark.usefixtures("two_workers")
def test_a_session_moves_to_a_worker_that_joined(stack: Stack, client: KvrecallClient) -> None:
    conversation, twin = (begin(client, 2) for _ in range(2))
    before = find_owner(stack, client, conversation.session)
    client.move(conversation.session)
    assert find_owner(stack, client, conversation.session) != before
    assert conversation.ask().text == twin.ask().text


@pytest.mark.usefixtures("two_workers")
def test_a_turn_whose_worker_is_killed_is_completed_by_the_other(
    stack: Stack, client: KvrecallClient
) -> None:
    conversation, twin = (begin(client, 4) for _ in range(2))
    expected = twin.go_on()
    owner = find_owner(stack, client, conversation.session)
    stream = conversation.stream()
    first = next(stream)
    assert isinstance(first, TextDelta)
    stack.kill(owner)
    rest, _ = hear(stream)
    assert first.text + rest == expected.text
    assert find_owner(stack, client, conversation.session) != owner, "the kill came too late"
    assert conversation.ask().text == twin.ask().text


@pytest.mark.usefixtures("two_workers")
def test_a_worker_that_dies_of_itself_is_started_again(
    stack: Stack, client: KvrecallClient
) -> None:
    conversation, twin = (begin(client, 5) for _ in range(2))
    expected = twin.ask()
    owner = find_owner(stack, client, conversation.session)
    stack.crash(owner)
    assert conversation.ask().text == expected.text

    def is_back() -> bool:
        (same,) = [each for each in stack.containers("worker") if each.id == owner.id] or [owner]
        return same.restarts == owner.restarts + 1 and same.is_healthy

    until(is_back, "its restart", DEADLINE_SECONDS)
    until(lambda: addresses(client) == names(stack), "both workers", DEADLINE_SECONDS)


def test_turns_succeed_while_a_worker_is_taken_away(stack: Stack, client: KvrecallClient) -> None:
    scale(stack, client, 2)
    conversations = [begin(client, seed) for seed in (6, 7) for _ in range(2)]
    one, one_twin, other, other_twin = conversations
    expected = [one_twin.go_on(), other_twin.go_on()]
    streams = [one.stream(), other.stream()]
    begun = [next(stream) for stream in streams]
    fewer = threading.Thread(target=stack.scale, args=(1,))
    fewer.start()
    heard = [hear(stream) for stream in streams]
    fewer.join()
    for first, (rest, _), twin in zip(begun, heard, expected, strict=True):
        assert isinstance(first, TextDelta)
        assert first.text + rest == twin.text
    until(lambda: addresses(client) == names(stack), "one worker", DEADLINE_SECONDS)
    assert [each.ask().text for each in (one, other)] == [
        each.ask().text for each in (one_twin, other_twin)
    ]


def test_a_restart_of_redis_loses_no_turn(stack: Stack, client: KvrecallClient) -> None:
    conversation, twin = (begin(client, 8) for _ in range(2))
    expected = twin.ask()
    stack.compose("restart", "redis")
    until(client.ready, "the gateway is ready", DEADLINE_SECONDS)
    assert conversation.ask().text == expected.text


def test_a_redis_that_is_killed_comes_back_with_every_turn(
    stack: Stack, client: KvrecallClient
) -> None:
    conversation, twin = (begin(client, 9) for _ in range(2))
    expected = twin.ask()
    (redis,) = stack.containers("redis")
    stack.crash(redis)
    until(lambda: restarts(stack) == redis.restarts + 1, "its restart", DEADLINE_SECONDS)
    until(client.ready, "the gateway is ready", DEADLINE_SECONDS)
    answer = conversation.ask()
    assert (answer.turn, answer.text) == (2, expected.text)


def test_redis_is_backed_up_and_restored_by_the_documented_lines(
    stack: Stack, client: KvrecallClient, tmp_path: Path
) -> None:
    conversation, twin = (begin(client, 10) for _ in range(2))
    stack.run_documented("backup-compose", BACKUP=str(tmp_path))
    expected = twin.ask()
    conversation.go_on()
    stack.run_documented("restore-compose", BACKUP=str(tmp_path))
    with stack.connect() as client:  # at the port that it has now
        until(client.ready, "the gateway is ready", DEADLINE_SECONDS)
        answer = replace(conversation, client=client).ask()
    assert (answer.turn, answer.text) == (2, expected.text)


def restarts(stack: Stack) -> int:
    """Restarts of Redis; -1 while it does not run."""
    return max((container.restarts for container in stack.containers("redis")), default=-1)
