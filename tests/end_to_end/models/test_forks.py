"""A fork says what a session says that had the same turns."""

from collections.abc import Callable

from tests.end_to_end.models.conversation import Conversation
from tests.end_to_end.servers import Json, Server


def test_a_fork_at_the_last_turn_and_one_at_an_earlier_turn(
    server: Server, begin: Callable[..., Conversation], method: Json, undisturbed: list[Json]
) -> None:
    parent = begin(server, method, 3)
    earlier, last = parent.fork(2), parent.fork()
    assert earlier.until(4).answers == undisturbed
    assert last.until(4).answers == undisturbed
    assert parent.until(4).answers == undisturbed


def test_a_fork_outlives_its_parent_and_a_kill(
    server: Server, begin: Callable[..., Conversation], recalled: list[Json]
) -> None:
    parent = begin(server, {}, 2)
    child = parent.fork()
    server.own.delete_session(parent.session)
    server.kill()
    server.start()
    grandchild = child.fork()
    assert child.until(3).answers == recalled[:3]
    assert grandchild.until(3).answers == recalled[:3]
