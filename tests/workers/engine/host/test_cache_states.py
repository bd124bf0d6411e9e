"""Sessions' pages and the RAM tier's others have one limit, and the least recently used make room."""

from contextlib import suppress

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from kvrecall.domain.page_ids import ID_BYTES, PageId
from kvstore.errors import TierFullError
from kvstore.format.codec import Codec, decode_page, encode_page
from kvstore.format.page import PageLayout, parse_header
from kvstore.tiers.ram import RamTier
from workers.engine.host.cache import HostCache

LIMIT = 100
PAGE, CODES = 10, 3
SESSIONS = st.sampled_from("abcde")
Held = dict[str, tuple[frozenset[PageId], int]]


def name_page(index: int, number: int = 1) -> PageId:
    """The id of the page that is written as number so many in a place."""
    return bytes([index, number % 256, number // 256]).ljust(ID_BYTES, b"i")


def pages(*indices: int, number: int = 1) -> list[PageId]:
    """Ids of pages in some places."""
    return [name_page(index, number) for index in indices]


def owned(limit: int) -> tuple[HostCache, Held]:
    """A cache in which sessions may hold so much, and what its owner holds by session."""
    cache = HostCache(RamTier(-(-4 * limit // 3)), PAGE, CODES)
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


def test_codes_of_a_page_count_once_and_as_long_as_a_session_uses_them() -> None:
    cache, _ = owned(8 * PAGE)
    cache.reserve("plain", pages(0, 1, 2))
    cache.reserve("a", pages(0, 1), coded=True)
    cache.reserve("b", [*pages(1), None], 1, coded=True)
    assert cache.used_bytes == 3 * PAGE + 2 * CODES + PAGE + CODES + 1
    cache.free("a")
    assert cache.used_bytes == 3 * PAGE + CODES + PAGE + CODES + 1
    cache.reserve("b", pages(1))
    assert cache.used_bytes == 3 * PAGE


def test_sessions_make_room_for_codes_too() -> None:
    cache, held = owned(8 * PAGE)
    for name, index in (("a", 0), ("b", 3)):
        assert hold_pages(cache, held, name, index)
    assert cache.reserve("c", pages(6), coded=True)
    assert set(held) == {"b"}
    assert cache.used_bytes == 4 * PAGE + 4 * CODES


def hold_pages(cache: HostCache, held: Held, session: str, index: int) -> bool:
    """Reserve three coded pages, from a place on."""
    ids = pages(index, index + 1, index + 2)
    held[session] = frozenset(ids), 0
    return cache.reserve(session, ids, coded=True)


def test_sessions_whose_pages_others_hold_too_make_room_together() -> None:
    cache, held = owned(LIMIT)
    for name in "ab":
        assert cache.reserve(name, pages(*range(8)))
        held[name] = frozenset(pages(*range(8))), 0
    assert cache.reserve("c", pages(*range(5), number=2))
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
    cache.reserve("a", [None, None])
    cache.put([None], [torch.zeros(1)])
    assert cache.get(None) is None
    assert cache.used_bytes == 2 * PAGE


LAYOUT = PageLayout(1, 1, 8, torch.float32, "states", 2)
PAGES = 16
INDICES = st.integers(0, 11)


def test_a_page_that_is_held_where_the_tier_has_it_takes_memory_once() -> None:
    """So there is room for as many others as if it were the tier's alone."""
    memory = RamTier(16 * LAYOUT.page_bytes)
    cache = HostCache(memory, LAYOUT.page_bytes)
    versions = pages(*range(16))
    for page in versions:
        memory.put([(page, encode(page))], backed=True)
    held = versions[:12]
    for name in "ab":
        assert cache.reserve(name, held)
        blobs = [blob for blob in memory.get(held) if blob is not None]
        cache.put(held, [decode_page(LAYOUT, parse_header(blob), blob) for blob in blobs])
        assert all(memory.contains(versions)[: len(held)])
        memory.check()
    for page in versions[12:]:
        memory.put([(page, encode(page))], backed=True)
    assert all(memory.contains(versions))
    for name in "ab":
        cache.free(name)
    assert memory.room_bytes == memory.limit_bytes
    assert all(memory.contains(versions)), "nothing is dropped when it is let go"
    memory.check()


class Memory(RuleBasedStateMachine):
    """Reservations, jobs, releases, writes and deletions in any order, over pages of one owner.

    `lent` has what each session holds: its pages' rows and its own bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tier = RamTier(PAGES * LAYOUT.page_bytes)
        self.cache = HostCache(self.tier, LAYOUT.page_bytes, CODES)
        self.lent: dict[str, tuple[dict[PageId, Tensor], int]] = {}
        self.coded: dict[str, bool] = {}
        self.cache.register(self.lent.__delitem__)
        self.pinned: set[str] = set()
        self.numbers = dict.fromkeys(range(12), 1)
        self.unbacked: set[int] = set()

    def version(self, index: int) -> PageId:
        return name_page(index, self.numbers[index])

    @rule(index=INDICES, backed=st.booleans(), codec=st.sampled_from(Codec), later=st.booleans())
    def write(self, index: int, backed: bool, codec: Codec, later: bool) -> None:
        """A page, the one in this place or the next one; without a lower tier that has it, it stays."""
        if later:
            self.tier.delete([self.version(index)])
            self.unbacked.discard(index)
            self.numbers[index] += 1
        if not self.put(index, backed, codec):
            return
        self.unbacked.discard(index)
        if not backed:
            self.unbacked.add(index)

    def put(self, index: int, backed: bool, codec: Codec) -> bool:
        page = self.version(index)
        with suppress(TierFullError):
            self.tier.put([(page, encode(page, codec))], backed=backed)
            return True
        return False

    @rule(
        session=SESSIONS,
        some=st.sets(INDICES),
        own=st.integers(0, 4 * LAYOUT.page_bytes),
        coded=st.booleans(),
    )
    def take(self, session: str, some: set[int], own: int, coded: bool) -> None:
        before = dict(self.lent)
        wanted = [self.version(index) for index in sorted(some)]
        reserved = self.cache.reserve(session, wanted, own, coded=coded)
        for name in self.pinned - {session}:
            assert self.lent.get(name) == before.get(name)
        if not reserved:
            assert self.lent == before, "nothing is dropped in vain"
            self.lent.pop(session, None)
            self.cache.free(session)
            return
        rows = [self.read(version) for version in wanted]
        self.cache.put(wanted, rows)
        self.lent[session] = dict(zip(wanted, rows, strict=True)), own
        self.coded[session] = coded

    def read(self, version: PageId) -> Tensor:
        """Rows that a session has, that lie in memory, or that come from below."""
        rows = self.cache.get(version)
        if rows is not None:
            return rows
        for _ in range(2):
            blob = self.tier.get([version])[0]
            if blob is not None:
                return decode_page(LAYOUT, parse_header(blob), blob)
            self.put(version[0], True, Codec.RAW)
        return rows_of(version)

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
        self.lent.pop(session, None)
        self.cache.free(session)

    @rule(index=INDICES)
    def delete(self, index: int) -> None:
        self.tier.delete([self.version(index)])
        self.unbacked.discard(index)

    @invariant()
    def all_of_it_is_counted_once_within_the_limit(self) -> None:
        held = {version for rows, _ in self.lent.values() for version in rows}
        own = sum(own for _, own in self.lent.values())
        coding = (rows for name, (rows, _) in self.lent.items() if self.coded[name])
        codes = {version for rows in coding for version in rows}
        used = len(held) * LAYOUT.page_bytes + len(codes) * CODES + own
        assert self.cache.used_bytes == used == self.tier.limit_bytes - self.tier.room_bytes
        assert used <= self.tier.limit_bytes - self.tier.limit_bytes // 4
        self.tier.check()
        for version in map(self.version, range(12)):
            assert (self.cache.get(version) is not None) == (version in held)

    @invariant()
    def the_tier_holds_what_sessions_have_of_it_and_nothing_else(self) -> None:
        where = {version: rows for held, _ in self.lent.values() for version, rows in held.items()}
        held_here = {
            version
            for version, rows in where.items()
            if (blob := self.tier.get([version])[0]) is not None
            and lies_in(rows, torch.frombuffer(blob, dtype=torch.uint8))
        }
        assert self.tier.held_bytes == len(held_here) * LAYOUT.page_bytes

    @invariant()
    def rows_that_are_held_stay_as_they_are(self) -> None:
        for rows, _ in self.lent.values():
            for version, of_page in rows.items():
                assert torch.equal(of_page, rows_of(version))

    @invariant()
    def pages_that_no_lower_tier_has_stay(self) -> None:
        assert all(self.tier.contains([self.version(index) for index in self.unbacked]))


def encode(page: PageId, codec: Codec = Codec.RAW) -> memoryview:
    """The page as a tier stores it."""
    return encode_page(LAYOUT, page, rows_of(page), codec, written_at=0)


def rows_of(page: PageId) -> Tensor:
    """The rows of a page; int8 has them exactly."""
    index, low, high = page[:3]
    return torch.full(LAYOUT.rows_shape(LAYOUT.page_tokens), index + 0.01 * (low + 256 * high))


def lies_in(rows: Tensor, memory: Tensor) -> bool:
    """Whether rows are a view of this memory."""
    return 0 <= rows.data_ptr() - memory.data_ptr() < memory.nbytes


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
