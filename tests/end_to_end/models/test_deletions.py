"""Deleted sessions leave neither rows nor states."""

from pathlib import Path
from typing import Any

from kvstore.fsck import check_directory, locked_directory
from tests.end_to_end.models.conversation import Begin
from tests.end_to_end.models.kinds import RECURRENT_KIND
from tests.end_to_end.servers import Server


def count_stored(server: Server) -> list[int]:
    """Pages and states in the files of a killed server."""
    folders = [server.data / "pages", server.data / "states" / "pages"]
    return [count_pages(folder) for folder in folders]


def count_pages(folder: Path) -> int:
    """Pages in a folder of segment files; none where there is no folder."""
    if not folder.is_dir():
        return 0
    with locked_directory(folder):
        return len(check_directory(folder).pages)


def test_nothing_is_stored_of_deleted_sessions(
    kind: str, server: Server, begin: Begin, say: Any
) -> None:
    parent = begin(server, turns=2)
    child = parent.fork()
    child.until(3)
    server.kill()
    pages, states = count_stored(server)
    assert pages > 0
    assert (states > 0) == (kind == RECURRENT_KIND)
    server.start()
    server.own.delete_session(parent.session)
    assert child.take(3)["usage"].output_tokens > 0
    for view in server.own.list_sessions(200).sessions:
        server.own.delete_session(view.id)
    say.until(lambda: server.metric("kvrecall_tier_bytes") == 0, "the sweep of shared pages")
    server.kill()
    assert count_stored(server) == [0, 0]
    server.start()
