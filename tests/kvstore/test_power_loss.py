"""Pages that were acknowledged as durable were synced before: a loss of power keeps them.

`PowerCut` records what each fsync covered. Only that is restored, as if the power had failed.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore.format.page import PageId, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.power_cut import PowerCut
from tests.kvstore.stored_rows import append, name_pages

LAYOUT = PageLayout(2, 2, 4, torch.float32, "model A", page_tokens=8)
PAGE = LAYOUT.page_tokens
SESSIONS = ("a", "b", "c")


@pytest.fixture
def power() -> Iterator[PowerCut]:
    """Records every fsync of the test."""
    with pytest.MonkeyPatch.context() as patch:
        cut = PowerCut(os.fsync)
        patch.setattr(os, "fsync", cut.fsync)
        yield cut


def open_store(directory: Path) -> RowStore:
    tier = NvmeTier(directory, segment_bytes=3 * LAYOUT.page_bytes, compact_in_background=False)
    return RowStore(LAYOUT, [RamTier(16 * LAYOUT.page_bytes), tier])


def make_rows(tokens: int, seed: int) -> Tensor:
    return torch.randn(LAYOUT.rows_shape(tokens), generator=torch.Generator().manual_seed(seed))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from(SESSIONS), st.integers(1, 20)),
        st.tuples(st.just("flush"), st.sampled_from(SESSIONS), st.just(0)),
        st.tuples(st.just("flush all"), st.just(""), st.just(0)),
        st.tuples(st.just("delete"), st.sampled_from(SESSIONS), st.just(0)),
    ),
    max_size=14,
)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_no_acknowledged_page_or_deletion_is_lost_with_the_power(
    steps: list[tuple[str, str, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        power = PowerCut(os.fsync)
        patch.setattr(os, "fsync", power.fsync)
        store = open_store(Path(folder, "rows"))
        rows: dict[str, Tensor] = {}
        durable: dict[str, int] = {}
        deleted = set[PageId]()
        for number, (what, session, tokens) in enumerate(steps):
            if what == "append":
                new = make_rows(tokens, number)
                append(store, session, new)
                rows[session] = torch.cat([rows[session], new], 3) if session in rows else new
            elif what == "delete":
                store.close_session(session)
                ids = name_pages(rows.pop(session), PAGE) if session in rows else []
                store.delete(ids).result()
                deleted.update(ids)
                durable.pop(session, None)
            else:
                names = sorted(rows) if what == "flush all" else [session]
                begun = [(name, store.begin_flush(name)) for name in names if name in rows]
                for name, flushed in begun:
                    assert flushed.result()
                    durable[name] = rows[name].shape[3] // PAGE
        power.restore(Path(folder, "restored"))
        store.close()
        restored = open_store(Path(folder, "restored"))
        assert not any(restored.contains(sorted(deleted))), "a deleted page came back"
        for session, expected in rows.items():
            ids = name_pages(expected, PAGE)
            restored.open(session, ids)
            missing = restored.repair_pages(session)
            assert all(index >= durable.get(session, 0) for index in missing)
            for index in set(range(len(ids))) - set(missing):
                positions = torch.arange(PAGE * index, PAGE * (index + 1))
                read = restored.gather(session, positions)
                assert torch.equal(read, expected[:, :, :, positions])
        restored.close()


def test_a_flush_is_acknowledged_after_the_sync(power: PowerCut, tmp_path: Path) -> None:
    store = open_store(tmp_path / "rows")
    append(store, "a", make_rows(PAGE, 0))
    before = power.calls
    assert store.flush("a")
    assert power.calls > before
    store.close()


def test_a_failed_sync_is_not_acknowledged_and_is_shown(
    power: PowerCut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "rows")
    for session in SESSIONS:
        append(store, session, make_rows(PAGE, 0))
    assert store.failures() == {}

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    flushes = [store.begin_flush(session) for session in SESSIONS]
    assert [flush.result(timeout=30) for flush in flushes] == [False] * 3
    assert "Input/output error" in store.failures()["nvme"]
    monkeypatch.setattr(os, "fsync", power.fsync)
    append(store, "a", make_rows(PAGE, 1))
    assert not store.flush("a"), "a retry of a failed sync proves nothing"
    assert set(store.failures()) == {"nvme"}
    with pytest.raises(Exception, match="sync failed"):
        store.close()
