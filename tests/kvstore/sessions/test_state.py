"""What a session knows of its pages."""

from kvstore.sessions.state import StoredSession
from tests.kvstore.page_ids import make_ids

ONE, TWO = make_ids(range(2))


def test_a_flush_does_not_cover_a_page_that_was_submitted_again_since() -> None:
    state = StoredSession("s")
    state.mark_unflushed(ONE)
    state.mark_unflushed(TWO)
    first = state.unflushed.copy()
    state.mark_unflushed(ONE)
    state.mark_flushed(first)
    assert set(state.unflushed) == {ONE}
    second = state.unflushed.copy()
    state.mark_flushed(second)
    state.mark_unflushed(ONE)
    state.mark_flushed(second)
    assert set(state.unflushed) == {ONE}
