"""Random turns, forks, deletions and failures: rows are right or reported as missing.

What is committed of a session, and what a fork shares, are whole pages.
"""

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from kvstore.errors import TierError, TierFailedError
from kvstore.format.commit_history import CommitHistory, CommitPoint
from kvstore.format.page import PageLayout
from kvstore.format.page_table import PageTable, SharedPages
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.failing_files import FaultyTier, snapshot, tear

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=2, head_dim=2, dtype=torch.float32, fingerprint="model A", page_tokens=4
)
PAGE = LAYOUT.page_tokens
RAM_PAGES = 4
BACKLOG_PAGES = 100  # More than a run writes, so that no append is refused.
WHICH = st.integers(0, 99)


class FaultMachine(RuleBasedStateMachine):
    """Acts as the worker and the catalog.

    `rows` are the appended rows per session, `committed` their committed length, which ends at a
    page, and `safe` the length that was reported as durable; sessions in `unopened` could not be
    opened.
    """

    files_above: bool

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.generation = 0
        self.rows: dict[str, Tensor] = {}
        self.committed: dict[str, int] = {}
        self.safe: dict[str, int] = {}
        self.shared: dict[str, list[SharedPages]] = {}
        self.epochs: dict[str, int] = {}
        self.commits: dict[str, dict[int, int]] = {}
        self.unopened: set[str] = set()
        self.deleted: set[str] = set()
        self.names = 0
        self.random = torch.Generator().manual_seed(0)
        self.open_store()

    # State

    def directories(self) -> list[Path]:
        names = ["above", "lowest"] if self.files_above else ["lowest"]
        return [self.root / f"{self.generation}-{name}" for name in names]

    def open_store(self) -> None:
        *above, lowest = self.directories()
        size = 5 * LAYOUT.page_bytes
        files = [NvmeTier(path, segment_bytes=size, name=path.name) for path in above]
        self.faulty = FaultyTier(lowest, segment_bytes=size, name=lowest.name)
        self.tiers: list[Tier] = [RamTier(RAM_PAGES * LAYOUT.page_bytes), *files, self.faulty]
        self.store = RowStore(LAYOUT, self.tiers, read_batch_pages=2, backlog_pages=BACKLOG_PAGES)

    def usable(self) -> list[str]:
        return sorted(self.rows.keys() - self.unopened)

    def pick(self, which: int, names: Sequence[str]) -> str:
        return names[which % len(names)]

    def shared_tokens(self, session: str) -> int:
        return PAGE * max((entry.pages for entry in self.shared[session]), default=0)

    def others_share(self, owner: str) -> int:
        """Number of leading pages of `owner` that other sessions share."""
        tables = [PageTable(name, shared) for name, shared in self.shared.items() if name != owner]
        shared = [
            index
            for table in tables
            for index in range(table.shared_pages)
            if table.key(index).session == owner
        ]
        return max((index + 1 for index in shared), default=0)

    def retained(self) -> list[SharedPages]:
        return [
            SharedPages(owner, pages)
            for owner in sorted(self.deleted)
            if (pages := self.others_share(owner))
        ]

    # Operations of a worker

    @precondition(lambda self: len(self.rows) < 5)
    @rule()
    def create(self) -> None:
        name = self.new_name()
        self.epochs[name] = 1
        try:
            self.store.open(name, epoch=1, length=0)
        except TierError:
            assert self.faulty.fails
            self.unopened.add(name)
        self.rows[name], self.shared[name] = torch.empty(LAYOUT.rows_shape(0)), []
        self.committed[name] = self.safe[name] = 0
        self.commits[name] = {}

    @precondition(lambda self: self.usable())
    @rule(which=WHICH, tokens=st.integers(0, 11), commit=st.booleans())
    def turn(self, which: int, tokens: int, commit: bool) -> None:
        name = self.pick(which, self.usable())
        rows = torch.randn(LAYOUT.rows_shape(tokens), generator=self.random)
        self.store.append(name, rows)
        self.rows[name] = torch.cat([self.rows[name], rows], 3)
        if commit:
            durable = self.store.flush(name)
            assert durable or (self.faulty.fails and not self.files_above)
            self.committed[name] = self.rows[name].shape[3] // PAGE * PAGE
            self.commits[name][self.epochs[name]] = self.committed[name]
            if durable:
                self.safe[name] = self.committed[name]

    @precondition(lambda self: self.rows)
    @rule(which=WHICH, later=st.integers(1, 2))
    def open_again(self, which: int, later: int) -> None:
        """Reopening discards the uncommitted rows, and those behind the last page."""
        self.reopen(self.pick(which, sorted(self.rows)), later)

    @precondition(lambda self: self.usable() and len(self.rows) < 5)
    @rule(which=WHICH, share=st.floats(0, 1))
    def fork(self, which: int, share: float) -> None:
        parent = self.pick(which, self.usable())
        child = self.new_name()
        length = int(share * self.committed[parent]) // PAGE * PAGE
        length = max(self.shared_tokens(parent), length)
        shared = [*self.shared[parent], SharedPages(parent, length // PAGE)]
        self.epochs[child] = 1
        try:
            self.store.fork(parent, child, epoch=1, length=length, shared=shared)
        except TierError:
            assert self.faulty.fails
            with suppress(TierError):
                self.store.delete(child)
            return
        self.rows[child], self.shared[child] = self.rows[parent][:, :, :, :length], shared
        self.committed[child], self.safe[child] = length, 0
        self.commits[child] = {1: length}
        if self.store.flush(child):
            self.safe[child] = length

    @precondition(lambda self: self.rows)
    @rule(which=WHICH)
    def delete(self, which: int) -> None:
        name = self.pick(which, sorted(self.rows))
        try:
            self.store.delete(name, keep_pages=self.others_share(name))
        except TierError:
            assert self.faulty.fails
            return
        owners = {entry.owner for entry in self.shared[name]}
        for state in (self.rows, self.committed, self.safe, self.shared, self.epochs, self.commits):
            del state[name]
        self.unopened.discard(name)
        self.deleted.add(name)
        for owner in owners & self.deleted:
            with suppress(TierError):
                self.store.delete(owner, keep_pages=self.others_share(owner))

    @precondition(lambda self: self.usable())
    @rule(which=WHICH, seed=st.integers(0, 999))
    def read(self, which: int, seed: int) -> None:
        name = self.pick(which, self.usable())
        expected = self.rows[name]
        if expected.shape[3]:
            positions = torch.randint(
                expected.shape[3], (5,), generator=torch.Generator().manual_seed(seed)
            )
            try:
                assert torch.equal(self.store.gather(name, positions), expected[:, :, :, positions])
            except TierFailedError:
                assert self.faulty.fails == "all"

    @precondition(lambda self: self.usable())
    @rule(which=WHICH)
    def prefetch_and_scan(self, which: int) -> None:
        name = self.pick(which, self.usable())
        self.store.prefetch(name)
        with suppress(TierFailedError):
            pieces = [keys for _, keys in self.store.scan_keys(name)]
            assert not pieces or torch.equal(torch.cat(pieces, 2), self.rows[name][:, 0])

    # Failures

    @rule(fails=st.sampled_from(["", "", "writes", "all"]))
    def fail(self, fails: str) -> None:
        self.faulty.fails = fails

    @precondition(lambda self: self.usable() and not self.faulty.fails)
    @rule(which=WHICH, page=WHICH)
    def delete_a_page(self, which: int, page: int) -> None:
        """It is missing for all sessions that share it, until one restores it."""
        self.store.check()
        name = self.pick(which, self.usable())
        table = PageTable(name, self.shared[name])
        full = self.rows[name].shape[3] // PAGE
        if not full:
            return
        index = page % full
        for tier in self.tiers:
            tier.delete([table.key(index)])
        sharing = [
            other
            for other in self.usable()
            if self.rows[other].shape[3] > index * PAGE
            and PageTable(other, self.shared[other]).key(index) == table.key(index)
        ]
        for other in sharing:
            assert self.store.repair_pages(other) == [index]
        self.store.restore(name, index, self.rows[name][:, :, :, PAGE * index : PAGE * (index + 1)])
        assert self.store.flush(name)
        for other in sharing:
            assert self.store.repair_pages(other) == []

    @rule(torn=st.floats(0, 1), crash=st.booleans())
    def start_again(self, torn: float, crash: bool) -> None:
        """Kill or close the process; rows that were reported as durable are there."""
        if not crash:
            self.faulty.fails = ""
            self.store.close()
            self.open_store()
        else:
            self.crash(torn)
        keep_pages = {each.owner: each.pages for each in self.retained()}
        for name in set(self.store.unclaimed()) - self.rows.keys():
            self.store.delete_unclaimed(name, keep_pages=keep_pages.get(name, 0))
        for name in sorted(self.rows):
            self.reopen(name, 1)
            self.rebuild(name)

    def crash(self, torn: float) -> None:
        with suppress(TierError):
            self.store.check()
        before = self.directories()
        self.generation += 1
        for old, new in zip(before, self.directories(), strict=True):
            snapshot(old, new)
            tear(new, torn)
        with suppress(TierError):
            self.store.close()
        self.open_store()

    # Helpers

    def new_name(self) -> str:
        self.names += 1
        return f"s{self.names}"

    def reopen(self, name: str, later: int) -> None:
        self.epochs[name] += later
        length = self.committed[name]
        history = CommitHistory([CommitPoint(*point) for point in self.commits[name].items()])
        try:
            self.store.open(
                name,
                epoch=self.epochs[name],
                length=length,
                shared=self.shared[name],
                history=history,
            )
        except TierError:
            assert self.faulty.fails
            self.unopened.add(name)
            return
        self.unopened.discard(name)
        self.rows[name] = self.rows[name][:, :, :, :length]

    def rebuild(self, name: str) -> None:
        """Only pages with rows that were not durable may be missing; restore them."""
        missing = self.store.repair_pages(name)
        assert all(index * PAGE >= self.safe[name] for index in missing)
        for index in self.store.missing_pages(name):
            assert index in missing
        for index in missing:
            self.store.restore(
                name, index, self.rows[name][:, :, :, PAGE * index : PAGE * (index + 1)]
            )
        assert self.store.repair_pages(name) == []
        assert torch.equal(self.read_all(name), self.rows[name])
        assert self.store.flush(name)
        self.safe[name] = self.committed[name]

    def read_all(self, name: str) -> Tensor:
        return self.store.gather(name, torch.arange(self.rows[name].shape[3]))

    @invariant()
    def lengths_match(self) -> None:
        assert {n: self.store.length(n) for n in self.usable()} == {
            n: self.rows[n].shape[3] for n in self.usable()
        }
        assert self.store.usage()["ram"] <= RAM_PAGES * LAYOUT.page_bytes

    def teardown(self) -> None:
        self.faulty.fails = ""
        for name in sorted(self.rows):
            if name in self.unopened:
                self.reopen(name, 1)
            assert self.store.repair_pages(name) == []
            assert self.store.flush(name)
            assert torch.equal(self.read_all(name), self.rows[name])
        self.store.check()
        for name in [*self.rows, *self.deleted]:
            self.store.delete(name)
        assert set(self.store.usage().values()) == {0}
        self.store.close()
        shutil.rmtree(self.root)


class OverOneTier(FaultMachine):
    files_above = False


class OverTwoTiers(FaultMachine):
    files_above = True


for machine in (OverOneTier, OverTwoTiers):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestStoreOverATierThatFails = OverOneTier.TestCase
TestStoreOverFilesAboveATierThatFails = OverTwoTiers.TestCase
