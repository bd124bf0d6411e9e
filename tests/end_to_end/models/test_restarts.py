"""A server that is killed between two turns, or within one, goes on with the same tokens."""

from typing import Any

import pytest

from kvrecall.client import KvrecallClient, KvrecallError, TextDelta, Turn
from tests.end_to_end.models.conversation import Begin, Undisturbed
from tests.end_to_end.servers import Server


def test_a_session_goes_on_after_a_kill(
    server: Server, begin: Begin, method: str, undisturbed: Undisturbed
) -> None:
    conversation = begin(server, method, 2)
    server.kill()
    server.start()
    assert conversation.until(3).answers == undisturbed(method)[:3]
    assert server.metric("kvrecall_worker_lost_pages_total") == 0
    assert server.metric("kvrecall_rebuild_seconds_count") == 0


def test_a_turn_in_which_the_server_is_killed_can_be_retried(
    server: Server, begin: Begin, say: Any
) -> None:
    def go_on(client: KvrecallClient, session: str) -> Turn:
        return client.turn(session, [say.user("Go on.")], max_tokens=96, key="broken")

    conversation, twin = begin(server, turns=1), begin(server, turns=1)
    expected = go_on(server.own, twin.session)
    then = twin.take(1)
    stream = server.own.stream(
        conversation.session, [say.user("Go on.")], max_tokens=96, key="broken"
    )
    assert [type(next(stream)) for _ in range(3)] == [TextDelta] * 3
    server.kill()
    with pytest.raises(KvrecallError):
        list(stream)
    server.start()
    assert server.own.get_session(conversation.session).turns == 1
    retried = go_on(server.own, conversation.session)
    assert (retried.message, retried.usage) == (expected.message, expected.usage)
    assert conversation.take(1) == then
