"""A tool's output is prefilled while it comes: the turn that follows answers the same, whatever happens."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(new_server: Callable[..., Any]) -> Iterator[Any]:
    """A server of this module."""
    server = new_server()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def pause(server: Any, say: Any) -> Callable[[], str]:
    """pause(): a session that waits for the output of `c1`; all of them say the same."""

    def begin() -> str:
        session: str = server.own.create_session().id
        asked = [say.user(say.chatter(60, 8)), say.asks("c1", what="log")]
        server.own.turn(session, asked, generate=False)
        return session

    return begin


def report(server: Any, say: Any, session: str, output: str) -> None:
    """Report the output in pieces, and wait until some of it is prefilled."""
    before = server.metric("kvrecall_worker_ahead_tokens_total", event="computed")
    for index in range(8):
        piece = output[len(output) * index // 8 : len(output) * (index + 1) // 8]
        server.own.event(session, "tool_call.delta", "c1", delta=piece, index=index)
    say.until(
        lambda: server.metric("kvrecall_worker_ahead_tokens_total", event="computed") > before,
        "prefill ahead",
    )


def test_a_reported_output_is_computed_before_the_turn(server: Any, pause: Any, say: Any) -> None:
    output = say.chatter(61, 40)
    result = [{"role": "tool", "content": output, "tool_call_id": "c1"}]
    expected = server.own.turn(pause(), result, **GREEDY)
    used = server.metric("kvrecall_worker_ahead_tokens_total", event="used")
    for completes in (True, False):
        session = pause()
        report(server, say, session, output)
        if completes:
            server.own.event(session, "tool_call.completed", "c1", result=output)
        found = server.own.turn(session, [] if completes else result, **GREEDY)
        assert (found.text, found.usage) == (expected.text, expected.usage)
        now = server.metric("kvrecall_worker_ahead_tokens_total", event="used")
        assert now >= used + 256
        used = now


def test_another_result_than_was_reported_is_computed_whole(
    server: Any, pause: Any, say: Any
) -> None:
    result = [{"role": "tool", "content": "Nothing was found.", "tool_call_id": "c1"}]
    expected = server.own.turn(pause(), result, **GREEDY)
    session = pause()
    report(server, say, session, say.chatter(62, 40))
    assert server.own.turn(session, result, **GREEDY).text == expected.text


def test_a_crash_loses_what_was_computed_ahead_and_nothing_else(
    server: Any, pause: Any, say: Any
) -> None:
    output = say.chatter(63, 40)
    result = [{"role": "tool", "content": output, "tool_call_id": "c1"}]
    expected = server.own.turn(pause(), result, **GREEDY)
    session = pause()
    report(server, say, session, output)
    server.kill()
    server.start()
    assert server.own.turn(session, result, **GREEDY).text == expected.text
