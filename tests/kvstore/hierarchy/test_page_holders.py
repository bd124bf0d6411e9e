"""Pages that somebody holds are not deleted, and those that are being deleted are not held."""

from threading import Thread

from kvstore.hierarchy.page_holders import PageHolders
from tests.kvstore.page_ids import make_ids

ONE, TWO, THREE = make_ids(range(3))


def test_a_page_is_free_once_everybody_has_released_it() -> None:
    holders = PageHolders()
    holders.hold([ONE, TWO])
    holders.hold([TWO])
    assert holders.select_free([ONE, TWO, THREE]) == [THREE]
    holders.release([ONE, TWO])
    assert holders.select_free([ONE, TWO, THREE]) == [ONE, THREE]
    holders.release([TWO])
    assert holders.select_free([ONE, TWO, THREE]) == [ONE, TWO, THREE]


def test_a_deletion_takes_free_pages_which_nobody_can_hold_until_its_end() -> None:
    holders = PageHolders()
    holders.hold([ONE])
    waiting = Thread(target=lambda: holders.hold([ONE, TWO]))
    with holders.deleting([ONE, TWO]) as free:
        assert free == {TWO}
        holders.hold([ONE, THREE])
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        assert holders.select_free([TWO]) == [TWO]
    waiting.join(30)
    assert not waiting.is_alive()
    assert holders.select_free([ONE, TWO, THREE]) == []
    with holders.deleting([ONE, TWO]) as free:
        assert free == frozenset()


def test_a_failed_deletion_ends_too() -> None:
    holders = PageHolders()
    try:
        with holders.deleting([ONE]):
            raise OSError
    except OSError:
        pass
    holders.hold([ONE])
    assert holders.select_free([ONE]) == []
