"""A gateway and two workers that share no rows: each has files of its own, and there is no Redis.

A session whose client gives a turn up in one worker, that continues in the other, and comes back.
"""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from kvrecall.client import KvrecallClient, TextDelta
from reference import MODEL_PATH

Json = dict[str, Any]
SETTINGS: Json = {"method": "full", "budget": 2048, "repair_rows": 0, "repair_on": [], "seed": 1}


@dataclass
class Workers:
    """The two workers and a client of their gateway."""

    names: list[str]
    client: KvrecallClient


@pytest.fixture(scope="module")
def workers(
    command: Callable[..., Any], say: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("without-redis")
    environment = {"KVRECALL_MODEL": str(MODEL_PATH)}
    processes = []
    for name in ("one", "two"):
        arguments = ["--name", name, "--listen", "127.0.0.1:0", "--data", str(folder / name)]
        arguments += ["--slots", "2", "--budget", "2048"]
        processes.append(command("worker", arguments, folder / f"{name}.log", environment))
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda process: process.start(), processes))
    addresses = ",".join(process.address for process in processes)
    arguments = ["--worker", addresses, "--port", "0", "--data", str(folder / "gateway")]
    gateway = command("gateway", arguments, folder / "gateway.log", environment)
    processes.append(gateway)
    try:
        gateway.start()
        with KvrecallClient(gateway.address, timeout_seconds=300.0) as client:
            say.until(lambda: len(client.workers()) == 2, "both workers")
            yield Workers([worker.name for worker in client.workers()], client)
    finally:
        for process in processes:
            process.end(signal.SIGKILL)


def fact(name: str, code: str) -> list[Json]:
    """A fact, and a recorded answer that repeats it."""
    return [
        {"role": "user", "content": f"Please note that the extension list says {name} {code}."},
        {"role": "assistant", "content": f"Noted, the extension list says {name} {code}."},
    ]


FIRST = fact("Toreva", "K1010") + fact("Quilby", "K2020") + fact("Sandor", "K3030")
LAST = fact("Verity", "K5050") + fact("Halden", "K6060")


@pytest.mark.parametrize("given_up", [False, True])
def test_a_turn_that_was_given_up_in_one_worker_is_never_remembered_there(
    workers: Workers, say: Any, given_up: bool
) -> None:
    client = workers.client
    one, two = workers.names
    session = client.create_session(**SETTINGS).id
    client.turn(session, [*FIRST, say.user("Hello.")], max_tokens=3)
    client.move(session, one)
    if given_up:
        note = [*FIRST, *fact("Melnor", "K4821"), *LAST, say.user("Thanks.")]
        stream = client.stream(session, note, max_tokens=300)
        assert isinstance(next(stream), TextDelta)
        stream.close()
        say.until(lambda: say.is_idle(client, session), "the end of the turn")
    client.move(session, two)
    note = [*FIRST, *fact("Melnor", "K7777"), *LAST, say.user("Thanks.")]
    client.turn(session, note, max_tokens=3)
    client.move(session, one)
    answer = client.turn(session, [say.user("What is Melnor's extension?")], max_tokens=32)
    assert "K7777" in answer.text
