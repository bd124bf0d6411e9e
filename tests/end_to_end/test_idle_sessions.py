"""A session that the worker has released goes on, forks and reports as if it had not been."""

from collections.abc import Iterator
from typing import Any

import pytest

SAMPLING = {"max_tokens": 8, "stop": ["<tool_call>"]}


@pytest.fixture(scope="module", params=["one process", "two workers on Redis"])
def server(request, new_server, new_cluster) -> Iterator[Any]:
    """A server whose workers release sessions after half a second."""
    new = new_server if request.param == "one process" else new_cluster
    own = new(KVRECALL_WORKER__IDLE_SECONDS="0.5")
    own.start()
    yield own
    own.kill()


def test_a_released_session_goes_on_as_it_was_committed(server, say) -> None:
    client = server.own

    def converse(pause) -> list[str]:
        """The answers of a conversation of three turns, the last in a fork."""
        session = client.create_session(
            budget=96, research={"method": "snapkv", "repair_rows": 16}, seed=4
        ).id
        pause()
        first = client.turn(session, [say.user(say.chatter(1, 12))], **SAMPLING)
        pause()
        assert client.memory(session).length == first.memory.length
        second = client.turn(session, [say.user(say.chatter(2, 9))], repair=True, **SAMPLING)
        pause()
        fork = client.fork(session).id
        pause()
        third = client.turn(fork, [say.user("And then?")], **SAMPLING)
        assert third.memory.length > second.memory.length > first.memory.length
        assert third.durable
        return [answer.message.content for answer in (first, second, third)]

    def await_release() -> None:
        say.until(lambda: server.metric("kvrecall_worker_sessions") == 0, "no open session")

    assert converse(await_release) == converse(lambda: None)
