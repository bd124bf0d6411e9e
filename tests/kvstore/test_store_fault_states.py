"""Random turns, forks, deletions and failures: rows are right or reported as missing.

What is committed of a session are whole pages.
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
from kvstore.format.encryption import KEY_BYTES
from kvstore.format.page import PageId, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.failing_files import FaultyTier, snapshot, tear
from tests.kvstore.stored_rows import list_stored, name_pages

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=2, head_dim=2, dtype=torch.float32, fingerprint="model A", page_tokens=4
)
PAGE = LAYOUT.page_tokens
RAM_PAGES = 4
BACKLOG_PAGES = 100  # More than a run writes, so that no append is refused.
WHICH = st.integers(0, 99)
NO_ROWS = torch.empty(LAYOUT.rows_shape(0))


class FaultMachine(RuleBasedStateMachine):
    """Acts as the worker and the catalog.

    `rows` are those of every page that there ever was, `safe` the pages that were reported as durable
    and not deleted since. `sessions` are the pages that a session has, `committed` those that the
    catalog knows of, `behind` the rows behind them. Sessions in `unopened` could not be opened.
    """

    files_above: bool
    key = b""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.generation = 0
        self.rows: dict[PageId, Tensor] = {}
        self.safe: set[PageId] = set()
        self.sessions: dict[str, list[PageId]] = {}
        self.committed: dict[str, list[PageId]] = {}
        self.behind: dict[str, Tensor] = {}
        self.unopened: set[str] = set()
        self.names = 0
        generator = torch.Generator().manual_seed(0)
        self.texts = [torch.randn(LAYOUT.rows_shape(400), generator=generator) for _ in range(2)]
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
        return sorted(self.sessions.keys() - self.unopened)

    def pick(self, which: int, names: Sequence[str]) -> str:
        return names[which % len(names)]

    def get_rows(self, session: str) -> Tensor:
        pages = [self.rows[page_id] for page_id in self.sessions[session]]
        return torch.cat([*pages, self.behind[session]], 3)

    def live(self) -> set[PageId]:
        """Pages that the catalog knows of."""
        return {page_id for ids in self.committed.values() for page_id in ids}

    # Operations of a worker

    @precondition(lambda self: len(self.sessions) < 5)
    @rule()
    def create(self) -> None:
        self.add_session([])

    @precondition(lambda self: self.usable())
    @rule(which=WHICH, text=st.integers(0, 1), tokens=st.integers(0, 11), commit=st.booleans())
    def turn(self, which: int, text: int, tokens: int, commit: bool) -> None:
        """Sessions whose rows are of one text have the same pages."""
        name = self.pick(which, self.usable())
        length = self.get_rows(name).shape[3]
        pages = self.sessions[name]
        rows = self.texts[text][:, :, :, length : length + tokens]
        behind = torch.cat([self.behind[name], rows], 3)
        ids = name_pages(behind, PAGE, pages[-1] if pages else b"")
        for index, page_id in enumerate(ids):
            self.rows[page_id] = behind[:, :, :, PAGE * index : PAGE * (index + 1)]
        self.store.append(name, rows, ids)
        pages += ids
        self.behind[name] = behind[:, :, :, PAGE * len(ids) :]
        if commit:
            self.commit(name)

    @precondition(lambda self: self.sessions)
    @rule(which=WHICH)
    def open_again(self, which: int) -> None:
        """Reopening discards the uncommitted rows, and those behind the last page."""
        self.reopen(self.pick(which, sorted(self.sessions)))

    @precondition(lambda self: self.sessions and len(self.sessions) < 5)
    @rule(which=WHICH, share=st.floats(0, 1), commit=st.booleans())
    def fork(self, which: int, share: float, commit: bool) -> None:
        committed = self.committed[self.pick(which, sorted(self.sessions))]
        child = self.add_session(committed[: int(share * len(committed))])
        if commit and child not in self.unopened:
            self.commit(child)

    @precondition(lambda self: self.sessions)
    @rule(which=WHICH, wait=st.booleans())
    def delete(self, which: int, wait: bool) -> None:
        name = self.pick(which, sorted(self.sessions))
        before = self.live()
        self.store.close_session(name)
        for state in (self.sessions, self.committed, self.behind):
            del state[name]
        self.unopened.discard(name)
        self.delete_pages(before - self.live(), wait)

    def delete_pages(self, dead: set[PageId], wait: bool) -> None:
        """Delete pages that no session has committed; open ones may have some of them."""
        held = {page_id for ids in self.sessions.values() for page_id in ids}
        self.safe -= dead - held
        deletion = self.store.delete(sorted(dead))
        if wait:
            deletion.result()

    @precondition(lambda self: self.usable())
    @rule(which=WHICH, seed=st.integers(0, 999))
    def read(self, which: int, seed: int) -> None:
        name = self.pick(which, self.usable())
        expected = self.get_rows(name)
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
            assert not pieces or torch.equal(torch.cat(pieces, 2), self.get_rows(name)[:, 0])

    # Failures

    @rule(fails=st.sampled_from(["", "", "writes", "all"]))
    def fail(self, fails: str) -> None:
        self.faulty.fails = fails

    @precondition(lambda self: self.usable() and not self.faulty.fails)
    @rule(which=WHICH, page=WHICH)
    def delete_a_page(self, which: int, page: int) -> None:
        """It is missing for all sessions that have it, until one restores it."""
        self.store.check()
        name = self.pick(which, self.usable())
        ids = self.sessions[name]
        if not ids:
            return
        index = page % len(ids)
        for tier in self.tiers:
            tier.delete([ids[index]])
        sharing = [other for other in self.usable() if ids[index] in self.sessions[other]]
        for other in sharing:
            assert self.store.repair_pages(other) == [index]
        self.store.restore(name, index, self.rows[ids[index]])
        assert self.store.flush(name)
        for other in sharing:
            assert self.store.repair_pages(other) == []

    @rule(torn=st.floats(0, 1), crash=st.booleans())
    def start_again(self, torn: float, crash: bool) -> None:
        """Kill or close the process; pages that were reported as durable are there."""
        if not crash:
            self.faulty.fails = ""
            self.store.close()
            self.open_store()
        else:
            self.crash(torn)
        self.store.delete(sorted(self.store.list_pages() - self.live())).result()
        self.safe &= self.live()
        assert list_stored(self.store) <= self.live()
        self.sessions = {name: [] for name in self.committed}
        for name in sorted(self.committed):
            self.reopen(name)
            assert self.store.repair_pages(name) == []
            assert torch.equal(self.read_all(name), self.get_rows(name))
            assert self.store.flush(name)
            self.safe.update(self.sessions[name])

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

    def add_session(self, ids: list[PageId]) -> str:
        self.names += 1
        name = f"s{self.names}"
        self.sessions[name], self.committed[name], self.behind[name] = [], ids, NO_ROWS
        self.reopen(name)
        return name

    def commit(self, name: str) -> None:
        durable = self.store.flush(name)
        assert durable or (self.faulty.fails and not self.files_above)
        before = self.live()
        self.committed[name] = list(self.sessions[name])
        if durable:
            self.safe.update(self.sessions[name])
        assert before <= self.live()

    def reopen(self, name: str) -> None:
        """Open a session with its committed pages; only pages that were not durable may be missing."""
        ids = list(self.committed[name])
        try:
            self.store.open(name, ids, self.key)
        except TierError:
            assert self.faulty.fails
            self.unopened.add(name)
            return
        self.unopened.discard(name)
        self.sessions[name], self.behind[name] = ids, NO_ROWS
        missing = self.store.missing_pages(name)
        assert not {ids[index] for index in missing} & self.safe
        for index in missing:
            self.store.restore(name, index, self.rows[ids[index]])

    def read_all(self, name: str) -> Tensor:
        return self.store.gather(name, torch.arange(self.get_rows(name).shape[3]))

    @invariant()
    def lengths_match(self) -> None:
        assert {name: self.store.length(name) for name in self.usable()} == {
            name: self.get_rows(name).shape[3] for name in self.usable()
        }
        assert self.store.usage()["ram"] <= RAM_PAGES * LAYOUT.page_bytes

    def teardown(self) -> None:
        self.faulty.fails = ""
        for name in sorted(self.sessions):
            if name in self.unopened:
                self.reopen(name)
            assert self.store.repair_pages(name) == []
            assert self.store.flush(name)
            assert torch.equal(self.read_all(name), self.get_rows(name))
        self.store.check()
        for name in self.sessions:
            self.store.close_session(name)
        self.store.delete(sorted(self.rows)).result()
        assert set(self.store.usage().values()) <= {0}
        self.store.check()
        self.store.close()
        shutil.rmtree(self.root)


class OverOneTier(FaultMachine):
    files_above = False


class OverTwoTiers(FaultMachine):
    """Its pages are encrypted."""

    files_above = True
    key = bytes(range(KEY_BYTES))


for machine in (OverOneTier, OverTwoTiers):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestStoreOverATierThatFails = OverOneTier.TestCase
TestStoreOverFilesAboveATierThatFails = OverTwoTiers.TestCase
