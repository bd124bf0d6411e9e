"""Random operations on a row store over small tiers, compared with a dict of pages and lists of ids."""

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
from kvstore.format.encryption import KEY_BYTES
from kvstore.format.page import PageId, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.stored_rows import list_stored, name_pages

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=2, head_dim=2, dtype=torch.float32, fingerprint="model A", page_tokens=4
)
PAGE = LAYOUT.page_tokens
RAM_PAGES = 3
SEGMENT_PAGES = 5
SESSIONS = st.sampled_from(["a", "b", "c"])
NO_ROWS = torch.empty(LAYOUT.rows_shape(0))


class RowStoreMachine(RuleBasedStateMachine):
    """`rows` are those of every page that there ever was; `sessions` are lists of their ids.

    `stored`: pages that must be there; of those in `doubtful` it is not known: a session dropped them
    before they were written. `behind`: rows of a session behind its pages; they end with the process.
    `unfinal`: sessions whose last rows are not final. `test_store_fault_states.py` has crashes.
    """

    key = b""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.rows: dict[PageId, Tensor] = {}
        self.stored: set[PageId] = set()
        self.doubtful: set[PageId] = set()
        self.sessions: dict[str, list[PageId]] = {}
        self.behind: dict[str, Tensor] = {}
        self.unfinal: set[str] = set()
        generator = torch.Generator().manual_seed(0)
        self.texts = [torch.randn(LAYOUT.rows_shape(400), generator=generator) for _ in range(2)]
        self.store = self.open_store()

    def open_store(self) -> RowStore:
        nvme = NvmeTier(self.directory, segment_bytes=SEGMENT_PAGES * LAYOUT.page_bytes)
        return RowStore(LAYOUT, [RamTier(RAM_PAGES * LAYOUT.page_bytes), nvme], read_batch_pages=2)

    def list_stored(self) -> set[PageId]:
        """Ids of the pages that are stored for good."""
        return list_stored(self.store)

    def require_empty(self) -> None:
        """The store has no page any more, and no file of one."""
        assert self.store.usage() == {"ram": 0, "nvme": 0}
        assert len(list(self.directory.glob("segment-*.kv"))) == 1

    def get_rows(self, session: str) -> Tensor:
        pages = [self.rows[page_id] for page_id in self.sessions.get(session, [])]
        return torch.cat([*pages, self.behind.get(session, NO_ROWS)], 3)

    def held(self) -> set[PageId]:
        return {page_id for ids in self.sessions.values() for page_id in ids}

    def drop(self, session: str, ids: list[PageId]) -> None:
        """Give a session other pages: those that it alone had may not have been written."""
        before = set(self.sessions.get(session, []))
        self.sessions[session] = ids
        self.behind.pop(session, None)
        self.unfinal.discard(session)
        lost = before - self.held()
        self.doubtful |= lost
        self.stored -= lost

    @rule(session=SESSIONS, text=st.integers(0, 1), tokens=st.integers(0, 11), final=st.booleans())
    def append(self, session: str, text: int, tokens: int, final: bool) -> None:
        """Sessions whose rows are of one text have the same pages."""
        length = self.get_rows(session).shape[3]
        if length + tokens > 400:
            return
        rows = self.texts[text][:, :, :, length : length + tokens]
        final = final and session not in self.unfinal
        pages = self.sessions.setdefault(session, [])
        behind = torch.cat([self.behind.get(session, NO_ROWS), rows], 3)
        ids: list[PageId] = []
        if final:
            ids = name_pages(behind, PAGE, pages[-1] if pages else b"")
            for index, page_id in enumerate(ids):
                self.rows[page_id] = behind[:, :, :, PAGE * index : PAGE * (index + 1)]
            pages += ids
            self.stored.update(ids)
            self.doubtful.difference_update(ids)
            behind = behind[:, :, :, PAGE * len(ids) :]
        else:
            self.unfinal.add(session)
        self.behind[session] = behind
        assert self.store.append(session, rows, ids, final=final) == length + tokens

    @rule(session=SESSIONS, share=st.floats(0, 1))
    def truncate(self, session: str, share: float) -> None:
        ids = self.sessions.get(session, [])
        kept = int(share * len(ids))
        self.store.truncate(session, PAGE * kept)
        if session in self.sessions:
            self.drop(session, ids[:kept])

    @rule(session=SESSIONS, share=st.floats(0, 1))
    def truncate_inside_what_is_not_kept(self, session: str, share: float) -> None:
        length = int(share * self.get_rows(session).shape[3])
        if length % PAGE or length > PAGE * len(self.sessions.get(session, [])):
            with pytest.raises(RowRangeError):
                self.store.truncate(session, length)

    @rule(session=SESSIONS)
    def flush(self, session: str) -> None:
        assert self.store.flush(session)
        assert set(self.sessions.get(session, [])) <= self.list_stored()

    @precondition(lambda self: self.rows)
    @rule(session=SESSIONS, data=st.data())
    def open(self, session: str, data: st.DataObject) -> None:
        """Any pages that there ever were, in any order; what is missing is restored."""
        ids = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, max_size=6))
        self.store.open(session, ids, self.key)
        self.drop(session, ids)
        missing = {ids[index] for index in self.store.missing_pages(session)}
        assert not missing & self.stored
        assert missing | self.stored | self.doubtful >= set(ids)
        for index in self.store.missing_pages(session):
            self.store.restore(session, index, self.rows[ids[index]])
        assert self.store.missing_pages(session) == []
        self.stored.update(ids)
        self.doubtful.difference_update(ids)

    @rule(session=SESSIONS, delete=st.booleans())
    def close(self, session: str, delete: bool) -> None:
        ids = self.sessions.get(session, [])
        self.store.close_session(session)
        self.sessions.pop(session, None)
        self.behind.pop(session, None)
        self.unfinal.discard(session)
        if delete:
            self.delete(ids)

    @rule()
    def delete_all(self) -> None:
        self.delete(list(self.rows))

    def delete(self, ids: list[PageId]) -> None:
        self.store.delete(ids).result()
        gone = set(ids) - self.held()
        self.stored -= gone
        self.doubtful -= gone
        assert not gone & self.list_stored()

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

    @rule(session=SESSIONS)
    def prefetch(self, session: str) -> None:
        self.store.prefetch(session)

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.store = self.open_store()
        self.behind.clear()
        self.unfinal.clear()
        assert self.stored <= self.list_stored() <= self.stored | self.doubtful
        for session, ids in self.sessions.items():
            self.store.open(session, ids, self.key)
            assert self.store.missing_pages(session) == []

    @invariant()
    def lengths_and_limits_hold(self) -> None:
        assert {name: self.store.length(name) for name in "abc"} == {
            name: self.get_rows(name).shape[3] for name in "abc"
        }
        assert self.store.sessions() == sorted(self.sessions)
        assert self.store.usage()["ram"] <= RAM_PAGES * LAYOUT.page_bytes

    def teardown(self) -> None:
        self.store.check()
        assert self.stored <= self.list_stored() <= self.stored | self.doubtful
        in_files = len(list_stored(self.store)) * LAYOUT.page_bytes
        assert in_files == self.store.usage()["nvme"]
        for name in self.sessions:
            rows = self.get_rows(name)
            assert torch.equal(self.store.gather(name, torch.arange(rows.shape[3])), rows)
            self.store.close_session(name)
        self.store.delete(list(self.rows)).result()
        self.require_empty()
        self.store.close()
        shutil.rmtree(self.directory)


RowStoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRowStore = RowStoreMachine.TestCase


class EncryptedStoreMachine(RowStoreMachine):
    """Pages of sessions that were opened are encrypted, and of those that began with rows are not."""

    key = bytes(range(KEY_BYTES))


EncryptedStoreMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None
)
TestEncryptedRowStore = EncryptedStoreMachine.TestCase
