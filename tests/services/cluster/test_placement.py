"""Where sessions go.

In proportion to slots, nowhere else than they must when workers come and go, and to no worker that
has more than its share of the turns.
"""

from hypothesis import assume, given
from hypothesis import strategies as st

from services.cluster.placement import Candidate, choose

KEYS = [f"s_{number}" for number in range(3000)]
WORKERS = [Candidate("a", 4), Candidate("b", 4), Candidate("c", 4)]
NAMES = st.lists(st.text("abcdefgh", min_size=1), min_size=1, max_size=8, unique=True)


@st.composite
def equal_workers(draw: st.DrawFn) -> list[Candidate]:
    """Workers with as many slots each, and any turns."""
    slots = draw(st.integers(0, 64))
    return [Candidate(name, slots, draw(st.integers(0, 200))) for name in draw(NAMES)]


@st.composite
def any_workers(draw: st.DrawFn) -> list[Candidate]:
    """Workers with any slots and any turns."""
    slots, turns = st.integers(0, 64), st.integers(0, 200)
    return [Candidate(name, draw(slots), draw(turns)) for name in draw(NAMES)]


def idle(candidates: list[Candidate]) -> list[Candidate]:
    """The same workers without turns."""
    return [Candidate(each.name, each.slots) for each in candidates]


def bound(candidates: list[Candidate], share: float | None = None) -> float:
    """The most turns of a worker that takes a session, by default where all have as many slots."""
    turns = sum(each.turns for each in candidates)
    least = 1 if turns < len(candidates) else 0
    return max(1.25 * (turns / len(candidates) if share is None else share), least)


def shares(candidates: list[Candidate]) -> dict[str, float]:
    """The share of the keys that each worker gets."""
    went = [choose(key, candidates) for key in KEYS]
    return {each.name: went.count(each.name) / len(went) for each in candidates}


def test_equal_workers_get_equal_shares() -> None:
    assert all(abs(share - 1 / 3) < 0.03 for share in shares(WORKERS).values())


def test_shares_are_proportional_to_slots() -> None:
    found = shares([Candidate("a", 1), Candidate("b", 3), Candidate("c", 8)])
    for name, weight in (("a", 1), ("b", 3), ("c", 8)):
        assert abs(found[name] - weight / 12) < 0.03


@given(st.text(), st.permutations(WORKERS))
def test_the_order_in_which_workers_are_known_does_not_matter(
    key: str, known: list[Candidate]
) -> None:
    assert choose(key, known) == choose(key, WORKERS)


@given(st.text(), equal_workers())
def test_the_chosen_worker_has_at_most_its_share_of_the_turns(
    key: str, candidates: list[Candidate]
) -> None:
    turns = {each.name: each.turns for each in candidates}
    chosen = choose(key, candidates)
    assert chosen is not None
    assert turns[chosen] <= bound(candidates) + 1e-9


@given(st.text(), any_workers())
def test_workers_unlike_each_other_are_chosen_within_what_their_slots_are_of_all(
    key: str, candidates: list[Candidate]
) -> None:
    chosen = next(each for each in candidates if each.name == choose(key, candidates))
    slots = sum(max(each.slots, 1) for each in candidates)
    share = max(chosen.slots, 1) / slots * sum(each.turns for each in candidates)
    assert chosen.turns <= bound(candidates, share) + 1e-9


@given(st.text(), equal_workers())
def test_a_key_stays_with_its_worker_while_that_has_a_slot_and_no_more_than_its_share(
    key: str, candidates: list[Candidate]
) -> None:
    name = choose(key, idle(candidates))
    home = next(each for each in candidates if each.name == name)
    assume(home.turns <= bound(candidates))
    assume(home.turns < home.slots or all(each.turns >= each.slots for each in candidates))
    assert choose(key, candidates) == name


@given(st.text(), any_workers())
def test_no_turn_waits_for_a_slot_while_another_worker_within_its_share_has_one(
    key: str, candidates: list[Candidate]
) -> None:
    name = choose(key, candidates)
    chosen = next(each for each in candidates if each.name == name)
    turns = sum(each.turns for each in candidates)
    slots = sum(max(each.slots, 1) for each in candidates)
    for each in candidates:
        if chosen.turns >= chosen.slots and each.turns < each.slots:
            assert each.turns > 1.25 * turns * each.slots / slots - 1e-9


@given(st.text(), any_workers(), st.data())
def test_a_worker_that_leaves_moves_its_own_keys_only(
    key: str, candidates: list[Candidate], data: st.DataObject
) -> None:
    workers = idle(candidates)
    gone = data.draw(st.sampled_from(workers))
    before = choose(key, workers)
    after = choose(key, [each for each in workers if each is not gone])
    assert after == before or before == gone.name


def test_a_worker_that_joins_takes_no_more_than_its_share() -> None:
    more = [*WORKERS, Candidate("d", 4)]
    moved = [key for key in KEYS if choose(key, more) != choose(key, WORKERS)]
    assert all(choose(key, more) == "d" for key in moved)
    assert abs(len(moved) / len(KEYS) - 1 / 4) < 0.03


@given(st.text(), st.integers(1, 8), st.integers(1, 200))
def test_turns_of_one_key_spread_over_as_many_workers_as_they_need(
    key: str, count: int, turns: int
) -> None:
    running = {f"w{number}": 0 for number in range(count)}
    for _ in range(turns):
        known = [Candidate(name, 4, load) for name, load in running.items()]
        chosen = choose(key, known)
        assert chosen is not None
        running[chosen] += 1
    assert max(running.values()) <= max(1.25 * turns / count, 1) + 1
    home = choose(key, [Candidate(name, 4) for name in running])
    assert home is not None
    assert running[home] >= min(turns, 1 + (count > 1)), "the first two stay together"


def test_without_workers_none_is_chosen() -> None:
    assert choose("s", []) is None
