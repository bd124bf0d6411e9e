"""Whose turn it is follows from weighted tokens alone, whatever comes and goes in whatever order."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.fairness.fair_shares import FairShares
from kvrecall.domain.fairness.share import Share

BLOCK = 256


def serve(shares: FairShares, backlog: list[Share], steps: int, cost: int = BLOCK) -> list[Share]:
    """Serve so many steps of work that never ends; returns whose they were."""
    served = []
    for _ in range(steps):
        chosen = min(backlog, key=shares.rank)
        shares.charge([(chosen, cost)])
        served.append(chosen)
    return served


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=6),
    costs=st.lists(st.integers(1, BLOCK), min_size=50, max_size=300),
)
def test_tenants_that_always_have_work_get_tokens_by_their_weights(
    weights: list[float], costs: list[int]
) -> None:
    shares = FairShares()
    work = [Share(str(number), "", weight) for number, weight in enumerate(weights)]
    tokens = Counter[Share]()
    for each in work:
        shares.enter(each)
    for cost in costs:
        chosen = min(work, key=shares.rank)
        shares.charge([(chosen, cost)])
        tokens[chosen] += cost
        times = [tokens[each] / each.weight for each in work]
        assert max(times) - min(times) <= BLOCK / min(weights)


@given(
    others=st.integers(1, 20),
    before=st.integers(0, 200),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_who_comes_waits_for_one_step_of_those_before_whatever_they_had(
    others: int, before: int, weight: float
) -> None:
    shares = FairShares()
    backlog = [Share(str(number)) for number in range(others)]
    for each in backlog:
        shares.enter(each)
    serve(shares, backlog, before)
    late = Share("late", "", weight)
    shares.enter(late)
    ahead = serve(shares, [*backlog, late], others + 1).index(late)
    assert ahead <= others
    if others == 1:
        assert ahead == 0 or not before, "of one other, not even one step"


@given(floods=st.integers(1, 100), before=st.integers(1, 100))
def test_the_number_of_a_tenants_requests_changes_nothing_for_another(
    floods: int, before: int
) -> None:
    shares = FairShares()
    flood = [Share("flood", str(number)) for number in range(floods)]
    for each in flood:
        shares.enter(each)
    serve(shares, flood, before)
    question = Share("other", "s")
    shares.enter(question)
    served = Counter(each.tenant for each in serve(shares, [*flood, question], 40))
    assert 0 <= served["other"] - served["flood"] <= 2


@given(keys=st.dictionaries(st.sampled_from("abc"), st.integers(1, 9), min_size=2))
def test_a_tenants_keys_share_evenly_however_many_requests_each_has(keys: dict[str, int]) -> None:
    shares = FairShares()
    backlog = [Share("t", key) for key, count in keys.items() for _ in range(count)]
    for each in backlog:
        shares.enter(each)
    served = Counter(each.flow for each in serve(shares, backlog, 30 * len(keys)))
    assert set(served.values()) == {30}


def test_background_work_comes_after_all_other() -> None:
    shares = FairShares()
    now, later = Share("a", "1"), Share("b", "2", background=True)
    for each in (now, later):
        shares.enter(each)
    assert set(serve(shares, [now, later], 50)) == {now}
    shares.leave(now)
    assert set(serve(shares, [later], 5)) == {later}


@given(absences=st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_to_leave_and_come_again_gains_nothing(absences: list[int]) -> None:
    shares = FairShares()
    steady, restless = Share("steady"), Share("restless")
    shares.enter(steady)
    served = Counter[str]()
    for absence in absences:
        for each in serve(shares, [steady], absence):
            served[each.tenant] += 1
        shares.enter(restless)
        for each in serve(shares, [steady, restless], 3):
            served[each.tenant] += 1
        shares.leave(restless)
    assert served["restless"] <= served["steady"] + 1


def test_flows_that_have_left_are_forgotten() -> None:
    shares = FairShares()
    shares.enter(Share("stays"))
    for number in range(5000):
        passing = Share(f"tenant {number}", f"session {number}")
        shares.enter(passing)
        shares.charge([(passing, BLOCK)])
        shares.leave(passing)
    assert len(shares._tenants) == 1
    assert len(shares._tenants._left) <= 1024
    assert list(shares._flows) == ["stays"]


def test_work_charged_after_its_end_changes_nothing() -> None:
    shares = FairShares()
    ended = Share("t", "s")
    shares.enter(ended)
    shares.leave(ended)
    before = shares.rank(ended)
    shares.charge([(ended, BLOCK), (replace(ended, tenant="other"), BLOCK)])
    assert shares.rank(ended) == before
