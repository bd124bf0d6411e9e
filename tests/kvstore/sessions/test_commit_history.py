"""Stored rows are read as committed ones only as far as the session's commit history says so."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from kvstore.errors import PageError, StaleWriterError
from kvstore.format.commit_history import CommitHistory, CommitPoint
from kvstore.format.page import PageLayout, first_sequence, get_epoch
from kvstore.format.page_table import PageTable, SharedPages
from kvstore.sessions.state import StoredSession
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

LAYOUT = PageLayout(
    n_layers=1, n_kv_heads=1, head_dim=2, dtype=torch.float32, fingerprint="m", page_tokens=8
)
PAGE = LAYOUT.page_tokens
WORKERS = "ab"
Stores = Callable[[str], RowStore]


def fill(value: float, tokens: int) -> Tensor:
    return torch.full(LAYOUT.rows_shape(tokens), float(value))


def commits(*points: tuple[int, int]) -> CommitHistory:
    return CommitHistory([CommitPoint(*point) for point in points])


def open_at(folder: Path) -> RowStore:
    return RowStore(LAYOUT, [RamTier(4 * LAYOUT.page_bytes), NvmeTier(folder)])


def values(store: RowStore, session: str) -> list[float]:
    """The value of each row; pages that are missing are left out."""
    found = []
    for index in range(store.length(session) // PAGE):
        if index in store.missing_pages(session):
            continue
        positions = torch.arange(index * PAGE, (index + 1) * PAGE)
        found += store.gather(session, positions)[0, 0, 0, :, 0].tolist()
    return found


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Factory `stores(worker)`: the store of a worker, which shares no tier with the others."""
    opened: dict[str, RowStore] = {}

    def get(worker: str) -> RowStore:
        if worker not in opened:
            opened[worker] = open_at(tmp_path / worker)
        return opened[worker]

    yield get
    for store in opened.values():
        store.close()


def test_the_committed_length_of_an_epoch_is_that_of_the_last_point_before_it() -> None:
    history = commits((2, 10), (5, 30))
    lengths = [history.committed_tokens(epoch) for epoch in range(7)]
    assert lengths == [0, 0, 10, 10, 10, 30, 30]
    assert [history.first_epoch(tokens) for tokens in (0, 10, 11, 30, 31)] == [2, 2, 5, 5, 0]


@pytest.mark.parametrize("restarted", [True, False])
def test_rows_of_an_aborted_turn_are_not_read_after_the_session_was_elsewhere(
    stores: Stores, tmp_path: Path, restarted: bool
) -> None:
    one, other = stores("a"), stores("b")
    one.open("s", epoch=1, length=0)
    one.append("s", fill(1, 8))
    assert one.flush("s")
    one.append("s", fill(666, 32))  # a turn that its client aborts
    assert one.flush("s")
    other.open("s", epoch=2, length=8, history=commits((1, 8)))
    assert other.missing_pages("s") == [0]
    other.restore("s", 0, fill(1, 8))
    other.append("s", fill(2, 32))
    assert other.flush("s")
    if restarted:
        one.close()
        one = open_at(tmp_path / "a")
    one.open("s", epoch=3, length=40, history=commits((1, 8), (2, 40)))
    assert one.missing_pages("s") == [1, 2, 3, 4]
    assert values(one, "s") == [1.0] * 8
    one.close()


def test_rows_in_memory_alone_are_not_read_after_the_session_was_elsewhere(
    stores: Stores,
) -> None:
    one = stores("a")
    one.open("s", epoch=1, length=0)
    one.append("s", fill(1, 8))
    one.append("s", fill(666, 20))  # never flushed, the last four in no page
    one.open("s", epoch=3, length=16, history=commits((1, 8), (2, 16)))
    assert one.missing_pages("s") == [1]
    assert values(one, "s") == [1.0] * 8
    one.check()


def test_memory_is_kept_over_takeovers_that_committed_nothing(stores: Stores) -> None:
    one = stores("a")
    one.open("s", epoch=1, length=0)
    one.append("s", fill(1, 16))
    one.append("s", fill(666, 20))
    one.open("s", epoch=9, length=16, history=commits((1, 16)))
    assert one.missing_pages("s") == []
    assert values(one, "s") == [1.0] * 16


def test_an_older_worker_keeps_what_was_committed_when_it_had_the_session(stores: Stores) -> None:
    one = stores("a")
    one.open("s", epoch=1, length=0)
    one.append("s", fill(1, 20))
    assert one.flush("s")
    one.open("s", epoch=8, length=40, history=commits((1, 16), (7, 40)))
    assert one.missing_pages("s") == [2, 3, 4]


def test_an_opening_without_a_history_trusts_only_the_epoch_before(stores: Stores) -> None:
    one = stores("a")
    one.open("s", epoch=1, length=0)
    one.append("s", fill(1, 24))
    assert one.flush("s")
    one.open("s", epoch=2, length=24)
    assert one.missing_pages("s") == []
    one.open("s", epoch=4, length=24)
    assert one.missing_pages("s") == [0, 1, 2]


@pytest.mark.parametrize("released", [True, False])
def test_an_aborted_first_turn_of_the_owner_is_not_read_through_a_shared_beginning(
    stores: Stores, released: bool
) -> None:
    one, other = stores("a"), stores("b")
    one.open("owner", epoch=1, length=0)
    one.append("owner", fill(666, 20))
    assert one.flush("owner")
    other.open("owner", epoch=2, length=0)
    other.append("owner", fill(2, 20))
    assert other.flush("owner")
    if released:
        one.release("owner")
    shared = [SharedPages("owner", 2, commits((2, 16)))]
    one.open("new", epoch=1, length=16, shared=shared)
    assert one.missing_pages("new") == [0, 1]
    other.open("new", epoch=2, length=16, shared=shared)
    assert values(other, "new") == [2.0] * 16


def test_a_restored_page_of_an_owner_is_believed_by_all_that_share_it(
    stores: Stores, tmp_path: Path
) -> None:
    one = stores("a")
    shared = [SharedPages("owner", 2, commits((5, 8), (9, 16)))]
    one.open("new", epoch=1, length=16, shared=shared)
    assert one.missing_pages("new") == [0, 1]
    for index in (0, 1):
        one.restore("new", index, fill(2, 8))
    assert one.flush("new")
    one.close()
    again = open_at(tmp_path / "a")
    again.open("other", epoch=1, length=16, shared=shared)
    assert values(again, "other") == [2.0] * 16
    again.close()


def test_each_epoch_counts_its_page_versions_anew() -> None:
    state = StoredSession("s", PageTable("s"), epoch=5)
    assert [state.next_sequence(), state.next_sequence()] == [
        first_sequence(5) + 1,
        first_sequence(5) + 2,
    ]
    state.epoch = 6
    assert state.next_sequence() == first_sequence(6) + 1


def test_page_versions_never_run_over_into_the_next_epoch() -> None:
    state = StoredSession("s", PageTable("s"), epoch=5)
    state.last_sequence = first_sequence(6) - 2
    assert get_epoch(state.next_sequence()) == 5
    with pytest.raises(StaleWriterError, match="later epoch"):
        state.next_sequence()
    state.epoch = 6
    assert state.next_sequence() == first_sequence(6) + 1


def test_a_store_whose_pages_have_the_last_number_of_an_epoch_continues_under_the_next(
    tmp_path: Path, make_page: Callable[..., tuple[object, bytes]], layout: PageLayout
) -> None:
    tier = NvmeTier(tmp_path / "rows")
    tier.put([make_page(0, first_sequence(2) - 1)])  # type: ignore[list-item]
    tier.close()
    store = RowStore(layout, [NvmeTier(tmp_path / "rows")])
    store.open("s", epoch=2, length=8)
    store.append("s", torch.zeros(layout.rows_shape(16)))
    assert store.flush("s")
    assert [
        get_epoch(header.sequence)
        for header in sorted(store._stack.tiers.lowest.stored("s"), key=lambda header: header.key)
    ] == [1, 2, 2]
    store.close()


class TwoWorkers(RuleBasedStateMachine):
    """Sessions of two workers without a shared tier: aborted turns, moves, restarts and commits.

    Acts as catalog and workers. Every appended row has a value of its own, and `committed` are the
    values of the committed rows of each session, whole pages. Those behind the last page are lost
    at the next opening.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = TemporaryDirectory()
        self.stores = {worker: self.open_store(worker) for worker in WORKERS}
        self.committed: dict[str, list[float]] = {"s": [], "t": []}
        self.points: dict[str, dict[int, int]] = {"s": {}, "t": {}}
        self.epochs = {"s": 0, "t": 0}
        self.value = 0

    def open_store(self, worker: str) -> RowStore:
        return open_at(Path(self.root.name) / worker)

    def open(self, session: str, worker: str) -> RowStore:
        """Open the session and compute its missing pages again, as a rebuild does."""
        store = self.stores[worker]
        self.epochs[session] += 1
        committed = self.committed[session]
        store.open(
            session,
            epoch=self.epochs[session],
            length=len(committed),
            history=commits(*self.points[session].items()),
        )
        assert store.length(session) == len(committed)
        self.require_committed(store, session)
        for index in store.repair_pages(session):
            rows = committed[index * PAGE : (index + 1) * PAGE]
            store.restore(session, index, self.to_rows(rows))
        return store

    def require_committed(self, store: RowStore, session: str) -> None:
        """Check that every row that can be read is a committed one."""
        expected = self.to_rows(self.committed[session])
        for position in range(expected.shape[3]):
            try:
                found = store.gather(session, torch.tensor([position]))
            except PageError:
                continue
            assert torch.equal(found, expected[:, :, :, position : position + 1])

    def to_rows(self, row_values: list[float]) -> Tensor:
        return (
            torch.tensor(row_values).view(1, 1, 1, -1, 1).expand(LAYOUT.rows_shape(len(row_values)))
        )

    @rule(
        session=st.sampled_from("st"),
        worker=st.sampled_from(WORKERS),
        tokens=st.integers(1, 20),
        commit=st.booleans(),
        flush=st.booleans(),
    )
    def turn(self, session: str, worker: str, tokens: int, commit: bool, flush: bool) -> None:
        store = self.open(session, worker)
        row_values = [float(self.value + number) for number in range(1, tokens + 1)]
        self.value += tokens
        store.append(session, self.to_rows(row_values))
        if commit or flush:
            assert store.flush(session)
        if commit:
            committed = self.committed[session] + row_values
            self.committed[session] = committed[: len(committed) // PAGE * PAGE]
            self.points[session][self.epochs[session]] = len(self.committed[session])

    @rule(session=st.sampled_from("st"), worker=st.sampled_from(WORKERS))
    def move(self, session: str, worker: str) -> None:
        self.open(session, worker)
        for other in WORKERS:
            if other != worker:
                self.stores[other].release(session)

    @rule(worker=st.sampled_from(WORKERS))
    def restart(self, worker: str) -> None:
        self.stores[worker].close()
        self.stores[worker] = self.open_store(worker)

    @rule(owner=st.sampled_from("st"), worker=st.sampled_from(WORKERS))
    def share(self, owner: str, worker: str) -> None:
        """A new session begins with the owner's whole committed pages."""
        pages = len(self.committed[owner]) // PAGE
        history = commits(*self.points[owner].items())
        store = self.stores[worker]
        self.committed["child"] = self.committed[owner][: pages * PAGE]
        shared = [SharedPages(owner, pages, history)] if pages else []
        store.open("child", epoch=1, length=pages * PAGE, shared=shared)
        self.require_committed(store, "child")
        store.delete("child")
        del self.committed["child"]

    @invariant()
    def stores_are_consistent(self) -> None:
        for store in self.stores.values():
            store.check()

    def teardown(self) -> None:
        for session in ("s", "t"):
            for worker in WORKERS:
                store = self.open(session, worker)
                assert values(store, session) == self.committed[session]
                store.check()
        for store in self.stores.values():
            store.close()
        self.root.cleanup()


TestTwoWorkers = TwoWorkers.TestCase
TestTwoWorkers.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
