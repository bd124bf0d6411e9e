"""The budget of a session that names none."""

from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.sessions.automatic_budget import LEAST, choose_budget


def test_it_is_an_eighth_within_its_limits() -> None:
    assert choose_budget(0, 4096) == LEAST
    assert choose_budget(16_000, 4096) == 2048
    assert choose_budget(16_385, 4096) == 2112
    assert choose_budget(100_000, 4096) == 4096
    assert choose_budget(100_000, 500) == 500


@given(rows=st.integers(0, 10**6), more=st.integers(0, 10**4), most=st.integers(1, 10**5))
def test_it_never_falls_as_a_session_grows_and_fits_a_slot(rows: int, more: int, most: int) -> None:
    assert choose_budget(rows, most) <= choose_budget(rows + more, most) <= most
