"""The host cache never exceeds its bound, and the least recently used sessions make room."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.format.page import PageKey
from kvstore.format.page_table import PageVersion
from workers.engine.host_cache import HostCache

LIMIT = 100
PAGE = 10
SESSIONS = st.sampled_from("abcde")
Held = dict[str, tuple[frozenset[PageVersion], int]]


def pages(*indices: int, owner: str = "o") -> list[PageVersion]:
    """Versions of pages of one owner."""
    return [PageVersion(PageKey(owner, index), 1) for index in indices]


def owned(limit: int) -> tuple[HostCache, Held]:
    """A cache, and what its owner holds by session."""
    cache = HostCache(limit, PAGE)
    held: Held = {}
    cache.register(held.__delitem__)
    return cache, held


def hold(cache: HostCache, held: Held, session: str, own: int) -> bool:
    """Reserve bytes for a session that has no page."""
    if not cache.reserve(session, (), own):
        return False
    held[session] = frozenset(), own
    return True


def test_the_least_recently_used_session_makes_room() -> None:
    cache, held = owned(LIMIT)
    for name in "abc":
        assert hold(cache, held, name, 30)
    cache.pin("a")
    cache.unpin("a")
    assert hold(cache, held, "d", 40)
    assert set(held) == {"a", "c", "d"}
    assert cache.evictions == 1


def test_a_pinned_session_keeps_its_copy() -> None:
    cache, held = owned(LIMIT)
    cache.pin("a")
    assert hold(cache, held, "a", 40)
    assert not hold(cache, held, "b", 70)
    assert set(held) == {"a"}, "nothing is dropped in vain"
    assert hold(cache, held, "b", 60)
    cache.unpin("a")
    cache.pin("b")
    assert hold(cache, held, "b", 80)
    assert set(held) == {"b"}


def test_a_hundred_sessions_over_one_beginning_take_its_bytes_once() -> None:
    cache, held = owned(8 * PAGE + 100)
    for number in range(100):
        name = f"s{number}"
        assert cache.reserve(name, pages(*range(8)), 1)
        held[name] = frozenset(pages(*range(8))), 1
    assert cache.used_bytes == 8 * PAGE + 100
    assert cache.evictions == 0


def test_sessions_whose_pages_others_hold_too_make_room_together() -> None:
    cache, held = owned(LIMIT)
    for name in "ab":
        assert cache.reserve(name, pages(*range(8)))
        held[name] = frozenset(pages(*range(8))), 0
    assert cache.reserve("c", pages(*range(5), owner="c"))
    assert not held
    assert cache.used_bytes == 5 * PAGE


def test_a_page_is_read_once_while_a_session_holds_it() -> None:
    cache, _ = owned(LIMIT)
    first, second = pages(0, 1)
    rows = [torch.zeros(1), torch.ones(1)]
    cache.put([first, second], rows)
    assert cache.get(first) is None, "no session holds it"
    cache.reserve("a", [first, second])
    cache.put([first, second], rows)
    cache.reserve("b", [second])
    cache.put([second], [torch.zeros(1)])
    assert cache.get(second) is rows[1], "the rows that are there stay"
    cache.free("a")
    assert cache.get(first) is None
    assert cache.get(second) is rows[1]
    cache.free("b")
    assert cache.get(second) is None


def test_a_page_that_may_change_is_read_by_each_session() -> None:
    cache, _ = owned(LIMIT)
    page = PageVersion(PageKey("a", 3), None)
    cache.reserve("a", [page])
    cache.put([page], [torch.zeros(1)])
    assert cache.get(page) is None
    assert cache.used_bytes == PAGE


class Sessions(RuleBasedStateMachine):
    """Reservations, jobs and releases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.held = owned(LIMIT)
        self.pinned: set[str] = set()

    @rule(session=SESSIONS, some=st.sets(st.integers(0, 11)), own=st.integers(0, 60))
    def reserve(self, session: str, some: set[int], own: int) -> None:
        before = dict(self.held)
        wanted = pages(*some)
        reserved = self.cache.reserve(session, wanted, own)
        for name in self.pinned - {session}:
            assert self.held.get(name) == before.get(name)
        if reserved:
            self.held[session] = frozenset(wanted), own
            self.cache.put(wanted, [torch.zeros(1)] * len(wanted))
        else:
            assert self.held == before

    @rule(session=SESSIONS)
    def start(self, session: str) -> None:
        self.pinned.add(session)
        self.cache.pin(session)

    @rule(session=SESSIONS)
    def end(self, session: str) -> None:
        self.pinned.discard(session)
        self.cache.unpin(session)

    @rule(session=SESSIONS)
    def free(self, session: str) -> None:
        self.held.pop(session, None)
        self.cache.free(session)

    @invariant()
    def what_is_held_is_counted_once_and_within_the_bound(self) -> None:
        held = frozenset[PageVersion]().union(*(some for some, _ in self.held.values()))
        own = sum(own for _, own in self.held.values())
        assert self.cache.used_bytes == len(held) * PAGE + own <= LIMIT
        for page in pages(*range(12)):
            assert (self.cache.get(page) is not None) == (page in held)


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
