"""More sessions than slots at once: each is answered as if it were alone, and nothing of them stays behind."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import psutil
import pytest

Json = dict[str, Any]
SESSIONS = 8
PAGE_BYTES = 64 * 5 * 2 * 2 * 64 * 4  # tokens, layers, heads, key and value, width, float32
SAMPLING = {"max_tokens": 10, "stop": ["<tool_call>"]}


@pytest.fixture
def empty(server, client) -> None:
    """No sessions."""
    delete_all(client)


def delete_all(client) -> None:
    while sessions := client.list_sessions(200).sessions:
        for session in sessions:
            client.delete_session(session)


def hold(server, say, number: int) -> list[Json]:
    """A conversation of two turns and a pause, unlike every other number's; gives what was answered."""
    client = server.client()
    session = client.create_session(budget=96 + 8 * number, repair_rows=16, seed=number).id
    told = [client.turn(session, [say.user(say.chatter(10 * number, 12 + number))], **SAMPLING)]
    call = say.asks("c1", name="Ada", thing="garage")
    told.append(
        client.turn(session, [say.user(say.chatter(10 * number + 1, 8)), call], generate=False)
    )
    client.event(session, "tool_call.completed", "c1", result=f"It is {number}{number}.")
    told.append(client.turn(session, [], wait_for_repairs=True, **SAMPLING))
    return [substance(asdict(answer)) for answer in told]


def substance(answer: Json) -> Json:
    memory = {name: value for name, value in answer["memory"].items() if name != "tier_bytes"}
    memory["repair"] = {**memory["repair"], "seconds": None}
    memory["repairs"] = [
        {**repair, "seconds": None, "in_pause": None, "bytes_read": None}
        for repair in memory["repairs"]
    ]
    return {**answer, "session": None, "seconds": None, "memory": memory}


def test_eight_sessions_in_two_slots_say_what_each_says_alone(server, client, empty, say) -> None:
    turns = server.metric("kvrecall_turns_total")
    alone = [hold(server, say, number) for number in range(SESSIONS)]
    with ThreadPoolExecutor(SESSIONS) as threads:
        together = list(threads.map(lambda number: hold(server, say, number), range(SESSIONS)))
    assert together == alone
    assert len({answer["message"]["content"] for _, _, answer in alone}) > 1
    assert server.metric("kvrecall_turns_total") == turns + 2 * 3 * SESSIONS
    assert server.metric("kvrecall_slots_in_use") == 2 * server.workers
    assert server.metric("kvrecall_worker_sessions") == 2 * SESSIONS
    assert server.metric("kvrecall_tier_bytes", tier="nvme") > 0
    assert server.metric("kvrecall_evicted_rows") > 0
    assert server.metric("kvrecall_active_rows") > 0


def test_deleted_sessions_leave_nothing(server, client, empty, say) -> None:
    hold(server, say, 0)
    delete_all(client)
    process = psutil.Process(server.process.pid)
    opened = len(process.open_files())
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: hold(server, say, number), range(4)))
    assert stored_bytes(server) > PAGE_BYTES
    delete_all(client)
    for metric in (
        "tier_bytes",
        "slots_in_use",
        "worker_sessions",
        "worker_queued",
        "active_rows",
        "evicted_rows",
    ):
        assert server.metric(f"kvrecall_{metric}") == 0, metric
    assert server.metric("kvrecall_turns_running") == server.metric("kvrecall_turns_waiting") == 0
    assert stored_bytes(server) < PAGE_BYTES * server.workers, (
        "only a few records that say what was deleted are left"
    )
    assert len(process.open_files()) <= opened


def stored_bytes(server) -> int:
    """Bytes of the files that hold rows."""
    return sum(
        path.stat().st_size
        for folder in server.rows
        for path in folder.rglob("*")
        if path.is_file()
    )


def test_over_capacity_is_429_and_room_comes_back(server, client, empty, say) -> None:
    sessions = [client.create_session(budget=128).id for _ in range(10)]
    clients = [server.client() for _ in range(9)]
    enough = threading.Event()

    def listen(number: int) -> None:
        """Follow a long answer until the test has seen enough; leaving cancels it."""
        long = {"messages": [say.user("Go on.")], "max_tokens": 2000}
        with clients[number].stream(sessions[number], **long) as answer:
            for _ in answer:
                if enough.is_set():
                    return

    with ThreadPoolExecutor(9) as threads:
        listening = [threads.submit(listen, number) for number in range(9)]
        say.until(lambda: server.metric("kvrecall_turns_waiting") == 1, "a full queue")
        body = {"messages": [say.user("Hello.")]}
        answer = server.http.post(f"/v1/sessions/{sessions[9]}/turns", json=body)
        enough.set()
    assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert all(listener.exception() is None for listener in listening)
    say.until(lambda: server.metric("kvrecall_turns_running") == 0, "room")
    assert client.turn(sessions[9], [say.user("Hello.")], generate=False).turn == 1
    assert all(client.get_session(session).turns == 0 for session in sessions[:9])
