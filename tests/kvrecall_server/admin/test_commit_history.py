"""The offline tools take stored rows for committed ones only as far as the commit history says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.commit_points import CommitPoint
from kvrecall.domain.sessions.session import Session, SharedPages
from kvrecall.domain.settings.session import SessionSettings
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.admin.archive.pages import read_pages
from kvrecall_server.admin.fsck import (
    REBUILT,
    Finding,
    KnownSession,
    merge_reports,
    session_findings,
)
from kvstore.format import commit_history
from kvstore.format.page import PageLayout
from kvstore.fsck import check_tier
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from services.catalog.records import SessionDump

LAYOUT = PageLayout(
    n_layers=1, n_kv_heads=1, head_dim=2, dtype=torch.float32, fingerprint="m", page_tokens=8
)
# 12 tokens were committed under epoch 1, 20 more under epoch 2 in another worker.
POINTS = (CommitPoint(1, 12), CommitPoint(2, 32))


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """Pages of 32 rows, written under epoch 1."""
    store = RowStore(LAYOUT, [NvmeTier(tmp_path / "rows")])
    store.open("s", epoch=1, length=0)
    store.append("s", torch.ones(LAYOUT.rows_shape(32)))
    store.close()
    return tmp_path / "rows"


def test_fsck_counts_uncommitted_rows_as_lost(pages: Path) -> None:
    tier = NvmeTier(pages)
    found = merge_reports([check_tier(tier)])
    tier.close()
    history = commit_history.CommitHistory(
        [commit_history.CommitPoint(point.epoch, point.length) for point in POINTS]
    )
    own = KnownSession("s", 3, 32, (), True, history)
    assert list(session_findings(own, found)) == [
        Finding("session s", "page 1 with 4 of 8 committed rows", REBUILT),
        Finding("session s", "pages 2 to 3 with 0 of 8 committed rows", REBUILT),
    ]
    child = KnownSession("c", 1, 16, (SharedPages("s", 2, POINTS),), True)
    assert [finding.what for finding in session_findings(child, found)] == [
        "page 1 written by s with 4 of 8 committed rows"
    ]


def test_an_export_leaves_uncommitted_rows_out(pages: Path) -> None:
    settings = SessionSettings(budget=64, repair_rows=0, method="full")
    session = Session("s", 3, settings, 0.0, 0.0, 2, MemoryReport(32))
    state = pb.SessionState(length=32).SerializeToString()
    tier = NvmeTier(pages)
    dump = SessionDump(session, state, (), history=POINTS)
    assert [record.value for record in read_pages(dump, [tier], LAYOUT.page_tokens)] == [0]
    shared = (SharedPages("s", 4, POINTS),)
    child = SessionDump(replace(session, id="c", shared=shared), state, ())
    assert [record.value for record in read_pages(child, [tier], LAYOUT.page_tokens)] == [0]
    tier.close()
