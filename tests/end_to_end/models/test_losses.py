"""What files have lost or changed is computed again from the log, with the same tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.models.conversation import Begin, Undisturbed
from tests.end_to_end.models.kinds import RECURRENT_KIND
from tests.end_to_end.servers import Server


def delete(path: Path) -> None:
    path.unlink()


def damage(path: Path) -> None:
    """Flip a bit in every part of a file."""
    content = bytearray(path.read_bytes())
    for at in range(500, len(content), 1000):
        content[at] ^= 4
    path.write_bytes(content)


def segments(folder: Path) -> list[Path]:
    """The files that pages are in."""
    found = list(folder.glob("segment-*.kv"))
    assert found
    return found


WAYS = pytest.mark.parametrize(
    ("method", "lose"), [("recalling", delete), ("bounded", damage)], indirect=["method"]
)


@WAYS
def test_lost_pages_are_computed_again(
    server: Server,
    begin: Begin,
    method: str,
    undisturbed: Undisturbed,
    lose: Callable[[Path], None],
) -> None:
    conversation = begin(server, method, 2)
    server.kill()
    for path in segments(server.data / "pages"):
        lose(path)
    server.start()
    assert conversation.until(3).answers == undisturbed(method)[:3]
    assert server.metric("kvrecall_worker_lost_pages_total") > 0
    assert server.metric("kvrecall_rebuild_seconds_count") > 0


@pytest.mark.parametrize("kind", [RECURRENT_KIND], indirect=True)
@WAYS
def test_lost_states_are_computed_again(
    server: Server,
    begin: Begin,
    method: str,
    undisturbed: Undisturbed,
    lose: Callable[[Path], None],
) -> None:
    conversation = begin(server, method, 2)
    server.kill()
    for path in segments(server.data / "states" / "pages"):
        lose(path)
    server.start()
    assert conversation.until(3).answers == undisturbed(method)[:3]
    assert server.metric("kvrecall_rebuild_seconds_count") == 1
    assert server.metric("kvrecall_worker_rebuilt_pages_total") == 1
    server.kill()
    server.start()
    assert conversation.until(4).answers == undisturbed(method)
    assert server.metric("kvrecall_rebuild_seconds_count") == 0, "the state is stored again"


@pytest.mark.parametrize("kind", [RECURRENT_KIND], indirect=True)
def test_lost_pages_and_states_are_computed_again_for_a_fork(
    server: Server, begin: Begin, undisturbed: Undisturbed
) -> None:
    parent = begin(server, turns=3)
    child = parent.fork(2)
    server.kill()
    for folder in ("pages", "states/pages"):
        for path in segments(server.data / folder):
            path.unlink()
    server.start()
    assert child.until(3).answers == undisturbed()[:3]
    assert parent.until(4).answers == undisturbed()
