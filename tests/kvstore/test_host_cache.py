"""The host cache never exceeds its bound, and the least recently used sessions make room."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.host_cache import HostCache, Kind

LIMIT = 100
SESSIONS = st.sampled_from("abcde")
KINDS: st.SearchStrategy[Kind] = st.sampled_from(["summaries", "copies"])


def owned(limit: int) -> tuple[HostCache, dict[Kind, dict[str, int]]]:
    """A cache, and what its owners hold, by kind and session."""
    cache = HostCache(limit)
    held: dict[Kind, dict[str, int]] = {"summaries": {}, "copies": {}}
    cache.register("summaries", held["summaries"].__delitem__)
    cache.register("copies", held["copies"].__delitem__)
    return cache, held


def test_the_least_recently_used_session_makes_room() -> None:
    cache, held = owned(LIMIT)
    for name in "abc":
        assert cache.reserve(name, "summaries", 30)
        held["summaries"][name] = 30
    cache.use("a")
    assert cache.reserve("d", "copies", 40)
    assert set(held["summaries"]) == {"a", "c"}
    assert cache.evictions == {"summaries": 1}


def test_a_pinned_session_keeps_its_copy_and_gives_its_summaries_for_another_copy() -> None:
    cache, held = owned(LIMIT)
    cache.pin("a")
    for kind in held:
        assert cache.reserve("a", kind, 40)
        held[kind]["a"] = 40
    assert not cache.reserve("b", "summaries", 30), "they do not take a running session's"
    assert not cache.reserve("b", "copies", 70)
    assert held == {"summaries": {"a": 40}, "copies": {"a": 40}}, "nothing is dropped in vain"
    assert cache.reserve("b", "copies", 60)
    assert held == {"summaries": {}, "copies": {"a": 40}}
    cache.unpin("a")
    cache.pin("b")
    assert cache.reserve("b", "summaries", 40)
    assert held["copies"] == {}


def test_a_session_makes_no_room_for_its_own_summaries() -> None:
    """Else the pages of a long session would drop one another's."""
    cache, held = owned(LIMIT)
    assert cache.reserve("a", "summaries", 90)
    held["summaries"]["a"] = 90
    assert not cache.reserve("a", "summaries", 110)
    assert cache.get_bytes("a", "summaries") == 90


class Sessions(RuleBasedStateMachine):
    """Reservations, jobs and releases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.held = owned(LIMIT)
        self.pinned: set[str] = set()

    @rule(session=SESSIONS, kind=KINDS, nbytes=st.integers(0, 120))
    def reserve(self, session: str, kind: Kind, nbytes: int) -> None:
        before = {each: dict(parts) for each, parts in self.held.items()}
        fits = self.cache.fits(session, kind, nbytes)
        assert self.cache.reserve(session, kind, nbytes) == fits
        for name in self.pinned - {session}:
            assert self.held["copies"].get(name) == before["copies"].get(name)
        if fits:
            self.held[kind][session] = nbytes
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

    @rule(session=SESSIONS, kind=KINDS)
    def free(self, session: str, kind: Kind) -> None:
        self.held[kind].pop(session, None)
        self.cache.free(session, kind)

    @invariant()
    def what_is_held_is_counted_and_within_the_bound(self) -> None:
        used = Counter({kind: sum(parts.values()) for kind, parts in self.held.items()})
        assert self.cache.used_bytes == dict(used)
        assert used.total() <= LIMIT


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
