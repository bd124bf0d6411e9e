"""Where sessions go.

In proportion to free slots, and nowhere else than they must when workers come and go.
"""

from hypothesis import given
from hypothesis import strategies as st

from services.cluster.placement import Candidate, choose

SESSIONS = [f"s_{number}" for number in range(3000)]
WORKERS = [Candidate("a", 4), Candidate("b", 4), Candidate("c", 4)]


def shares(candidates: list[Candidate]) -> dict[str, float]:
    """The share of the sessions that each worker gets."""
    went = [choose(session, candidates) for session in SESSIONS]
    return {each.name: went.count(each.name) / len(went) for each in candidates}


def test_equal_workers_get_equal_shares() -> None:
    assert all(abs(share - 1 / 3) < 0.03 for share in shares(WORKERS).values())


def test_shares_are_proportional_to_free_slots() -> None:
    found = shares([Candidate("a", 1), Candidate("b", 3), Candidate("c", 8)])
    total = 1.5 + 3.5 + 8.5
    for name, weight in (("a", 1.5), ("b", 3.5), ("c", 8.5)):
        assert abs(found[name] - weight / total) < 0.03


def test_a_worker_without_free_slots_still_gets_sessions() -> None:
    assert 0 < shares([Candidate("a", 0), Candidate("b", 4)])["a"] < 0.2


@given(st.text(), st.permutations(WORKERS))
def test_the_order_in_which_workers_are_known_does_not_matter(
    session: str, known: list[Candidate]
) -> None:
    assert choose(session, known) == choose(session, WORKERS)


def test_a_worker_that_leaves_moves_its_own_sessions_only() -> None:
    for session in SESSIONS:
        before = choose(session, WORKERS)
        after = choose(session, WORKERS[:2])
        assert after == before or before == "c"


def test_a_worker_that_joins_takes_no_more_than_its_share() -> None:
    more = [*WORKERS, Candidate("d", 4)]
    moved = [session for session in SESSIONS if choose(session, more) != choose(session, WORKERS)]
    assert all(choose(session, more) == "d" for session in moved)
    assert abs(len(moved) / len(SESSIONS) - 1 / 4) < 0.03


def test_without_workers_none_is_chosen() -> None:
    assert choose("s", []) is None
