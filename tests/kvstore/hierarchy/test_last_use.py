"""When pages were used last."""

from kvstore.hierarchy.last_use import LastUse
from tests.kvstore.page_ids import make_id, make_ids


def test_pages_are_idle_that_nobody_used_within_the_time() -> None:
    uses = LastUse()
    uses.touch([make_id(0)])
    assert uses.select_idle(make_ids(range(3)), 3600.0) == make_ids(range(1, 3))
    assert uses.select_idle(make_ids(range(3)), 0.0) == make_ids(range(3))


def test_only_uses_that_decide_nothing_are_forgotten() -> None:
    uses = LastUse()
    uses.touch([make_id(0)])
    uses.forget(3600.0)
    assert uses.select_idle([make_id(0)], 3600.0) == []
    uses.forget(0.0)
    assert uses.select_idle([make_id(0)], 3600.0) == [make_id(0)]
