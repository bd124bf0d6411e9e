"""Deleted sessions leave neither rows nor states."""

from typing import Any

from tests.end_to_end.models.conversation import Begin
from tests.end_to_end.models.files import count_stored
from tests.end_to_end.models.kinds import RECURRENT_KIND
from tests.end_to_end.servers import Server


def test_nothing_is_stored_of_deleted_sessions(
    kind: str, server: Server, begin: Begin, say: Any
) -> None:
    parent = begin(server, turns=2)
    child = parent.fork()
    child.until(3)
    server.kill()
    pages, states = count_stored(server.data)
    assert pages > 0
    assert (states > 0) == (kind == RECURRENT_KIND)
    server.start()
    server.own.delete_session(parent.session)
    assert child.take(3)["usage"].output_tokens > 0
    for view in server.own.list_sessions(200).sessions:
        server.own.delete_session(view.id)
    say.until(lambda: server.metric("kvrecall_tier_bytes") == 0, "the sweep of shared pages")
    server.kill()
    assert count_stored(server.data) == [0, 0]
    server.start()
