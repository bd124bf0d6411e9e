"""A fork says what a session says that had the same turns."""

from tests.end_to_end.models.conversation import Begin, Undisturbed
from tests.end_to_end.servers import Server


def test_a_fork_at_the_last_turn_and_one_at_an_earlier_turn(
    server: Server, begin: Begin, method: str, undisturbed: Undisturbed
) -> None:
    parent = begin(server, method, 3)
    earlier, last = parent.fork(2), parent.fork()
    assert earlier.until(4).answers == undisturbed(method)
    assert last.until(4).answers == undisturbed(method)
    assert parent.until(4).answers == undisturbed(method)


def test_a_fork_outlives_its_parent_and_a_kill(
    server: Server, begin: Begin, undisturbed: Undisturbed
) -> None:
    parent = begin(server, turns=2)
    child = parent.fork()
    server.own.delete_session(parent.session)
    server.kill()
    server.start()
    grandchild = child.fork()
    assert child.until(3).answers == undisturbed()[:3]
    assert grandchild.until(3).answers == undisturbed()[:3]
