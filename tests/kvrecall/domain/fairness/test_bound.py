"""What one tenant may hold of a number of places leaves some to those that come later."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.fairness.bound import has_room


def take_all(tenants: int, places: int, share: float) -> list[int]:
    """Let tenants take places one after the other until none may; returns what each holds."""
    held = [0] * tenants
    taken = True
    while taken:
        taken = False
        for tenant in range(tenants):
            if has_room(held[tenant], sum(held), places, share):
                held[tenant] += 1
                taken = True
    return held


@pytest.mark.parametrize(("places", "held"), [(16, 12), (64, 48), (4, 3), (2, 2), (1, 1), (0, 0)])
def test_a_lone_tenant_gets_its_share_and_few_places_as_a_whole(places: int, held: int) -> None:
    assert take_all(1, places, 0.75) == [held]


@given(tenants=st.integers(1, 8), places=st.integers(32, 256))
def test_a_tenant_that_comes_later_finds_a_place(tenants: int, places: int) -> None:
    held = take_all(tenants, places, 0.75)
    assert max(held) - min(held) <= 1
    assert has_room(0, sum(held), places, 0.75)


def test_with_a_share_of_one_the_first_may_hold_all() -> None:
    assert take_all(1, 16, 1.0) == [16]


def test_a_heavier_tenant_may_hold_more() -> None:
    assert not has_room(12, 12, 16, 0.75)
    assert has_room(12, 12, 16, 0.75, weight=2.0)
