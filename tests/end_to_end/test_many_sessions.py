"""More sessions than slots at once: each answers as if it were alone, and deletion leaves nothing.

The servers are this file's own: metrics count all sessions of a server, and other tests leave some
on the shared one, among them sessions of tenants, which no list shows here. Workers release deleted
sessions in the background, so each test starts once everything of the test before is released.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

Json = dict[str, Any]
SESSIONS = 8
PAGE_BYTES = 64 * 5 * 2 * 2 * 64 * 4  # tokens, layers, heads, key and value, width, float32
# Metrics that are 0 on a server without sessions, summed over workers and tiers.
SESSION_METRICS = (
    "tier_bytes",
    "shared_tier_bytes",
    "worker_slots_in_use",
    "worker_sessions",
    "worker_jobs",
    "worker_active_rows",
    "worker_evicted_tokens",
    "turns_running",
    "turns_waiting",
)
SAMPLING = {"max_tokens": 10, "stop": ["<tool_call>"]}
RUNNING_TURNS = 8
LIMITS = {
    "KVRECALL_SERVICE__MAX_RUNNING_TURNS": str(RUNNING_TURNS),
    "KVRECALL_SERVICE__TENANT_SHARE": "1",
    "KVRECALL_SERVICE__MAX_WAITING_TURNS": "1",
    "KVRECALL_SERVICE__QUEUE_SECONDS": "300",
    "KVRECALL_SERVICE__DEFAULT_MAX_TOKENS": "8",
    "KVRECALL_SERVICE__MAX_OUTPUT_TOKENS": "2000",
}


@pytest.fixture(scope="module", params=["one process", "two workers on Redis"])
def server(request, new_server, new_cluster) -> Iterator[Any]:
    """A server that only the tests of this file use."""
    new = new_server if request.param == "one process" else new_cluster
    own = new(**LIMITS)
    own.start()
    yield own
    own.kill()


@pytest.fixture
def empty(server, client, say) -> None:
    """No sessions: the workers have released those of the test before."""
    delete_all(server, client, say)


def delete_all(server, client, say) -> None:
    """Delete all sessions and wait until every worker reports that it has released them."""
    while sessions := client.list_sessions(200).sessions:
        for session in sessions:
            client.delete_session(session)
    for metric in SESSION_METRICS:
        say.until(
            lambda name=metric: is_released(server, name),
            f"{metric} of 0",
            lambda name=metric: server.samples(f"kvrecall_{name}"),
        )


def is_released(server, metric: str) -> bool:
    """True if a metric is 0 while all workers answer: those of others are missing in the sum."""
    all_answer = server.metric("kvrecall_worker_up") == server.workers
    return all_answer and server.metric(f"kvrecall_{metric}") == 0


def agrees_on_shared_rows(server) -> bool:
    """True if every worker counts the same bytes, and some, in the tier that they share if any."""
    counted = [sample.value for sample in server.samples("kvrecall_shared_tier_bytes")]
    return all(counted) and len(set(counted)) <= 1


def converse(server, say, number: int) -> list[Json]:
    """The answers of a conversation of two turns and a pause, unlike that of any other number."""
    client = server.client()
    session = client.create_session(
        budget=96 + 8 * number, research={"method": "snapkv", "repair_rows": 16}, seed=number
    ).id
    answers = [client.turn(session, [say.user(say.chatter(10 * number, 12 + number))], **SAMPLING)]
    call = say.asks("c1", name="Ada", thing="garage")
    answers.append(
        client.turn(session, [say.user(say.chatter(10 * number + 1, 8)), call], generate=False)
    )
    client.event(session, "tool_call.completed", "c1", result=f"It is {number}{number}.")
    answers.append(client.turn(session, [], wait_for_repairs=True, **SAMPLING))
    return [without_times(asdict(answer)) for answer in answers]


def without_times(answer: Json) -> Json:
    """An answer without ids, times, and the bytes that other sessions leave to it in the tiers."""
    memory = {name: value for name, value in answer["memory"].items() if name != "tier_bytes"}
    memory["repair"] = {**memory["repair"], "seconds": None}
    memory["repairs"] = [
        {**repair, "seconds": None, "in_pause": None, "bytes_read": None}
        for repair in memory["repairs"]
    ]
    return {**answer, "session": None, "seconds": None, "memory": memory}


def test_eight_sessions_in_two_slots_answer_as_each_does_alone(server, client, empty, say) -> None:
    turns = server.metric("kvrecall_turns_total")
    alone = [converse(server, say, number) for number in range(SESSIONS)]
    with ThreadPoolExecutor(SESSIONS) as threads:
        together = list(threads.map(lambda number: converse(server, say, number), range(SESSIONS)))
    assert together == alone
    assert len({answer["message"]["content"] for _, _, answer in alone}) > 1
    assert server.metric("kvrecall_turns_total") == turns + 2 * 3 * SESSIONS
    for name, count in (
        ("worker_slots_in_use", 2 * server.workers),
        ("worker_sessions", 2 * SESSIONS),
    ):
        say.until(
            lambda name=name, count=count: server.metric(f"kvrecall_{name}") == count,
            f"{name} of {count}",
        )
    assert server.metric("kvrecall_tier_bytes", tier="nvme") > 0
    assert server.metric("kvrecall_worker_evicted_tokens") > 0
    assert server.metric("kvrecall_worker_active_rows") > 0


def test_deleted_sessions_leave_nothing(server, client, empty, say) -> None:
    converse(server, say, 0)
    delete_all(server, client, say)
    process = psutil.Process(server.process.pid)
    opened = len(process.open_files())
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: converse(server, say, number), range(4)))
    assert stored_bytes(server) > PAGE_BYTES
    # A worker knows of the others' rows what they published last: a 0 might be from before these.
    say.until(lambda: agrees_on_shared_rows(server), "the same rows in the tier that is shared")
    delete_all(server, client, say)
    for metric in SESSION_METRICS:
        assert server.metric(f"kvrecall_{metric}") == 0, metric
    say.until(
        lambda: stored_bytes(server) < PAGE_BYTES * server.workers,
        "files with no more than a few records of deletions",
    )
    say.until(lambda: len(process.open_files()) <= opened, "as few open files as before")


def stored_bytes(server) -> int:
    """Bytes of the files with rows."""
    paths = [path for folder in server.rows for path in folder.rglob("*")]
    return sum(file_bytes(path) for path in paths)


def file_bytes(path: Path) -> int:
    """Size of a file; 0 for a folder, and for a file that was deleted meanwhile."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def test_over_capacity_is_429_until_turns_end(server, client, empty, say) -> None:
    followed = RUNNING_TURNS + 1
    sessions = [client.create_session(budget=128).id for _ in range(followed + 1)]
    clients = [server.client() for _ in range(followed)]
    enough = threading.Event()

    def listen(number: int) -> None:
        """Read a long answer until the test has ended; closing the stream cancels the turn."""
        long = {"messages": [say.user("Go on.")], "max_tokens": 2000}
        with clients[number].stream(sessions[number], **long) as answer:
            for _ in answer:
                if enough.is_set():
                    return

    with ThreadPoolExecutor(followed) as threads:
        listening = [threads.submit(listen, number) for number in range(followed)]
        say.until(lambda: server.metric("kvrecall_turns_waiting") == 1, "a full queue")
        body = {"messages": [say.user("Hello.")]}
        answer = server.http.post(f"/v1/sessions/{sessions[-1]}/turns", json=body)
        enough.set()
    assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert [listener.exception() for listener in listening] == [None] * followed
    say.until(lambda: server.metric("kvrecall_turns_running") == 0, "room")
    assert client.turn(sessions[-1], [say.user("Hello.")], generate=False).turn == 1
    assert all(client.get_session(session).turns == 0 for session in sessions[:-1])
