"""A gateway and two workers that share no rows: each has files of its own, and there is no Redis.

A session whose client gives a turn up in one worker, that continues in the other, and comes back.
Conversations of one agent, whose beginning each worker computes once.
"""

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from kvrecall.client import KvrecallClient, TextDelta
from reference import MODEL_PATH

Json = dict[str, Any]
SLOTS = 2
CONVERSATIONS = 100
SETTINGS: Json = {
    "research": {"method": "full", "repair_rows": 0, "repair_on": []},
    "budget": 2048,
    "seed": 1,
}


@dataclass
class Workers:
    """The two workers and a client of their gateway."""

    names: list[str]
    client: KvrecallClient
    http: httpx.Client


@pytest.fixture(scope="module")
def workers(
    command: Callable[..., Any], say: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("without-redis")
    environment = {"KVRECALL_MODEL": str(MODEL_PATH)}
    processes = []
    for name in ("one", "two"):
        arguments = ["--name", name, "--listen", "127.0.0.1:0", "--data", str(folder / name)]
        arguments += ["--slots", str(SLOTS), "--budget", "2048"]
        processes.append(command("worker", arguments, folder / f"{name}.log", environment))
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda process: process.start(), processes))
    addresses = ",".join(process.address for process in processes)
    arguments = ["--worker", addresses, "--port", "0", "--data", str(folder / "gateway")]
    gateway = command("gateway", arguments, folder / "gateway.log", environment)
    processes.append(gateway)
    try:
        gateway.start()
        with (
            KvrecallClient(gateway.address, timeout_seconds=300.0) as client,
            httpx.Client(base_url=gateway.address, timeout=300.0) as http,
        ):
            say.until(lambda: len(client.workers()) == 2, "both workers")
            yield Workers([worker.name for worker in client.workers()], client, http)
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


@dataclass
class Agent:
    """Conversations of one agent: the worker of each, and how many computed their beginning."""

    workers: Workers
    system: str
    model: str
    went: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def ask(self, number: int, **options: Any) -> Json:
        """The request that begins a conversation."""
        said = {"role": "user", "content": f"I am caller {number}. Hello!"}
        messages = [{"role": "system", "content": self.system}, said]
        return {"model": self.model, "messages": messages, "max_tokens": 1, **options}

    def converse(self, number: int) -> str:
        """A conversation of one turn; returns its worker."""
        answer = self.workers.http.post("/v1/chat/completions", json=self.ask(number))
        answer.raise_for_status()
        usage = answer.json()["usage"]["prompt_tokens_details"]
        return self._note(answer, computed=not usage["cached_tokens"])

    def keep_talking(self, number: int) -> str:
        """A conversation whose answer has no end before `ended`."""
        body = self.ask(number, max_tokens=1_000, ignore_eos=True, stream=True)
        with self.workers.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            worker = self._note(answer, computed=False)
            self.ended.wait()
        return worker

    def _note(self, answer: httpx.Response, *, computed: bool) -> str:
        worker = self.workers.client.get_session(answer.headers["kvrecall-session"]).worker
        self.went[worker] += 1
        self.computed += computed
        return worker


def test_each_worker_computes_the_beginning_of_an_agents_conversations_once(
    workers: Workers, say: Any
) -> None:
    """The family's worker first; the other one from where the first has no free slot."""
    model = workers.http.get("/v1/models").json()["data"][0]["id"]
    agent = Agent(workers, say.chatter(3, 24), model)
    home = agent.converse(0)
    with ThreadPoolExecutor(SLOTS) as threads:
        talking = [threads.submit(agent.keep_talking, 1 + number) for number in range(SLOTS)]
        try:
            say.until(lambda: agent.went.total() == 1 + SLOTS, "turns that run")
            elsewhere = agent.converse(1 + SLOTS)
        finally:
            agent.ended.set()
        assert {each.result() for each in talking} == {home} != {elsewhere}
    assert agent.computed == 2
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(agent.converse, range(2 + SLOTS, CONVERSATIONS)))
    assert agent.computed == 2
    assert agent.went.total() == CONVERSATIONS
    assert set(agent.went) == {home, elsewhere}
