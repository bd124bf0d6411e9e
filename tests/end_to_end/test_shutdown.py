"""SIGTERM: running turns complete or are rolled back, and the exit code is 0."""

import threading
from typing import Any

from kvrecall.client import KvrecallError, Overloaded, TextDelta, TurnCompleted


def in_background(request) -> tuple[threading.Thread, list[Any]]:
    """Send a request; the thread appends its response or error to the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(request())
        except KvrecallError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_a_running_turn_completes_and_the_next_server_has_it(new_server, say) -> None:
    server = new_server(KVRECALL_SERVICE__DRAIN_SECONDS="300")
    server.start()
    client = server.client()
    session = client.create_session(budget=128, seed=3).id
    events = client.stream(session, [say.user("Go on.")], max_tokens=400)
    assert isinstance(next(events), TextDelta)
    thread, results = in_background(lambda: list(events))
    assert server.stop() == 0
    thread.join()
    done = results[0][-1]
    assert isinstance(done, TurnCompleted)
    assert (done.turn.turn, done.turn.usage.output_tokens) == (1, 400)
    server.start()
    found = server.own.get_session(session)
    assert (found.turns, found.length) == (1, done.turn.memory.length)


def test_a_turn_that_takes_too_long_is_rolled_back(new_server, say) -> None:
    server = new_server(KVRECALL_SERVICE__DRAIN_SECONDS="1")
    server.start()
    client = server.client()
    session = client.create_session(budget=128, seed=3).id
    client.turn(session, [say.user(say.chatter(31, 10))], generate=False)
    before = client.get_session(session)
    messages = [say.user(say.chatter(32, 10))]
    sampling = {"max_tokens": 4096}
    thread, outcome = in_background(lambda: client.turn(session, messages, **sampling))
    say.until(lambda: server.own.get_session(session).state == "decoding", "the answer")
    assert server.stop() == 0
    thread.join()
    assert isinstance(outcome[0], Overloaded)
    assert (outcome[0].status, outcome[0].code) == (503, "shutting_down")
    assert outcome[0].retry_after_seconds == 1.0
    server.start()
    assert server.own.get_session(session) == before
    assert server.own.turn(session, [say.user("Hello.")], generate=False).turn == 2
