"""Random operations on a row store over small tiers, compared with a dict of tensors."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from kvstore.errors import RowRangeError
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=2, head_dim=2, dtype=torch.float32, fingerprint="model A", page_tokens=4
)
PAGE = LAYOUT.page_tokens
RAM_PAGES = 3
SEGMENT_PAGES = 5
SESSIONS = st.sampled_from(["a", "b", "c"])


class RowStoreMachine(RuleBasedStateMachine):
    """`rows` are the expected rows per session; those behind the last page end with the process.

    `final`: rows of a session before the first one that is never written.
    `test_store_fault_states.py` has crashes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.rows: dict[str, Tensor] = {}
        self.final: dict[str, int] = {}
        self.random = torch.Generator().manual_seed(0)
        self.store = self.open_store()

    def open_store(self) -> RowStore:
        nvme = NvmeTier(self.directory, segment_bytes=SEGMENT_PAGES * LAYOUT.page_bytes)
        return RowStore(LAYOUT, [RamTier(RAM_PAGES * LAYOUT.page_bytes), nvme], read_batch_pages=2)

    def get_rows(self, session: str) -> Tensor:
        return self.rows.get(session, torch.empty(LAYOUT.rows_shape(0)))

    def count_kept(self, session: str) -> int:
        """Rows of the session's whole pages of final rows."""
        length = self.get_rows(session).shape[3]
        return min(length, self.final.get(session, length)) // PAGE * PAGE

    @rule(session=SESSIONS, tokens=st.integers(0, 11), final=st.booleans())
    def append(self, session: str, tokens: int, final: bool) -> None:
        rows = torch.randn(LAYOUT.rows_shape(tokens), generator=self.random)
        before = self.get_rows(session)
        final = final and session not in self.final
        if not final:
            self.final.setdefault(session, before.shape[3])
        self.rows[session] = torch.cat([before, rows], 3)
        assert self.store.append(session, rows, final=final) == self.rows[session].shape[3]

    @rule(session=SESSIONS, share=st.floats(0, 1))
    def truncate(self, session: str, share: float) -> None:
        length = int(share * self.count_kept(session)) // PAGE * PAGE
        self.store.truncate(session, length)
        self.final.pop(session, None)
        if session in self.rows:
            self.rows[session] = self.rows[session][:, :, :, :length]

    @rule(session=SESSIONS, share=st.floats(0, 1))
    def truncate_inside_what_is_not_kept(self, session: str, share: float) -> None:
        length = int(share * self.get_rows(session).shape[3])
        if length % PAGE or length > self.count_kept(session):
            with pytest.raises(RowRangeError):
                self.store.truncate(session, length)

    @rule(session=SESSIONS)
    def flush(self, session: str) -> None:
        assert self.store.flush(session)

    @rule(session=SESSIONS)
    def drop(self, session: str) -> None:
        self.store.delete(session)
        self.rows.pop(session, None)
        self.final.pop(session, None)

    @rule(session=SESSIONS, seed=st.integers(0, 999), rows=st.integers(0, 9))
    def gather(self, session: str, seed: int, rows: int) -> None:
        expected = self.get_rows(session)
        if expected.shape[3]:
            positions = torch.randint(
                expected.shape[3], (rows,), generator=torch.Generator().manual_seed(seed)
            )
            assert torch.equal(self.store.gather(session, positions), expected[:, :, :, positions])

    @rule(
        session=SESSIONS,
        seed=st.integers(0, 999),
        sizes=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    )
    def gather_selection(self, session: str, seed: int, sizes: tuple[int, int]) -> None:
        expected = self.get_rows(session)
        generator = torch.Generator().manual_seed(seed)
        selection = [
            torch.randint(-1, expected.shape[3], (2, size), generator=generator) for size in sizes
        ]
        gathered = self.store.gather_selection(session, selection)
        padded = torch.cat([expected, torch.zeros(LAYOUT.rows_shape(1))], 3)
        for layer, positions in enumerate(selection):
            for side in (0, 1):
                rows = [padded[layer, side, head][positions[head]] for head in range(2)]
                assert torch.equal(gathered[layer][side], torch.stack(rows))

    @rule(session=SESSIONS)
    def scan(self, session: str) -> None:
        pieces = [keys for _, keys in self.store.scan_keys(session)]
        if pieces:
            assert torch.equal(torch.cat(pieces, 2), self.get_rows(session)[:, 0])

    @rule(session=SESSIONS, backwards=st.booleans())
    def read_keys(self, session: str, backwards: bool) -> None:
        expected = self.get_rows(session)[:, 0]
        pages = list(range(-(-expected.shape[2] // PAGE)))[:: -1 if backwards else 1]
        for index, keys in zip(pages, self.store.read_keys(session, pages).keys, strict=True):
            assert torch.equal(keys, expected[:, :, index * PAGE : (index + 1) * PAGE])

    @precondition(lambda self: self.rows)
    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.store = self.open_store()
        self.rows = {
            session: rows[:, :, :, :kept]
            for session, rows in self.rows.items()
            if (kept := self.count_kept(session))
        }
        self.final.clear()

    @invariant()
    def lengths_and_limits_hold(self) -> None:
        assert {name: self.store.length(name) for name in "abc"} == {
            n: self.get_rows(n).shape[3] for n in "abc"
        }
        assert self.store.usage()["ram"] <= RAM_PAGES * LAYOUT.page_bytes

    def teardown(self) -> None:
        self.store.check()
        assert set(self.store.sessions()) == set(self.rows)
        for name, rows in self.rows.items():
            assert torch.equal(self.store.gather(name, torch.arange(rows.shape[3])), rows)
        for name in self.store.sessions():
            self.store.delete(name)
        assert self.store.usage() == {"ram": 0, "nvme": 0}
        assert len(list(self.directory.glob("segment-*.kv"))) == 1
        self.store.close()
        shutil.rmtree(self.directory)


RowStoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRowStore = RowStoreMachine.TestCase
