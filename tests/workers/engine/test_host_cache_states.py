"""The host cache never exceeds its bound, and the least recently used sessions make room."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.engine.host_cache import HostCache

LIMIT = 100
SESSIONS = st.sampled_from("abcde")


def owned(limit: int) -> tuple[HostCache, dict[str, int]]:
    """A cache, and the bytes that its owner holds by session."""
    cache = HostCache(limit)
    held: dict[str, int] = {}
    cache.register(held.__delitem__)
    return cache, held


def test_the_least_recently_used_session_makes_room() -> None:
    cache, held = owned(LIMIT)
    for name in "abc":
        assert cache.reserve(name, 30)
        held[name] = 30
    cache.pin("a")
    cache.unpin("a")
    assert cache.reserve("d", 40)
    assert set(held) == {"a", "c"}
    assert cache.evictions == 1


def test_a_pinned_session_keeps_its_copy() -> None:
    cache, held = owned(LIMIT)
    cache.pin("a")
    assert cache.reserve("a", 40)
    held["a"] = 40
    assert not cache.reserve("b", 70)
    assert held == {"a": 40}, "nothing is dropped in vain"
    assert cache.reserve("b", 60)
    held["b"] = 60
    cache.unpin("a")
    cache.pin("b")
    assert cache.reserve("b", 80)
    assert held == {"b": 60}


class Sessions(RuleBasedStateMachine):
    """Reservations, jobs and releases in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.held = owned(LIMIT)
        self.pinned: set[str] = set()

    @rule(session=SESSIONS, nbytes=st.integers(0, 120))
    def reserve(self, session: str, nbytes: int) -> None:
        before = dict(self.held)
        reserved = self.cache.reserve(session, nbytes)
        for name in self.pinned - {session}:
            assert self.held.get(name) == before.get(name)
        if reserved:
            self.held[session] = nbytes
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
    def what_is_held_is_counted_and_within_the_bound(self) -> None:
        assert self.cache.used_bytes == sum(self.held.values()) <= LIMIT


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
