"""A process that is killed while it writes loses no whole page that it acknowledged."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvstore
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.page_ids import make_id, make_ids

LAYOUT = PageLayout(
    n_layers=2, n_kv_heads=2, head_dim=16, dtype=torch.float32, fingerprint="model A"
)

# Row values encode session and position, so that a misplaced row is detected.
WRITER = """
import sys, itertools, torch
from pathlib import Path
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.page_ids import make_ids

layout = PageLayout(2, 2, 16, torch.float32, "model A")
nvme = NvmeTier(Path(sys.argv[1]), segment_bytes=20 * layout.page_bytes)
store = RowStore(layout, [RamTier(8 * layout.page_bytes), nvme])
committed = dict(pair.split("=") for pair in sys.argv[2:])
for session in ("0", "1"):
    whole = int(committed.get(session, 0)) // layout.page_tokens
    store.open(session, make_ids(range(whole), session))
    assert not store.missing_pages(session)
for turn in itertools.count():
    session = str(turn % 2)
    length = store.length(session)
    tokens = 7 + 31 * turn % 150
    values = torch.arange(length, length + tokens) * 2.0 + int(session)
    pages = range(length // layout.page_tokens, (length + tokens) // layout.page_tokens)
    rows = values.view(1, 1, 1, -1, 1).expand(layout.rows_shape(tokens))
    store.append(session, rows, make_ids(pages, session))
    store.flush(session)
    # Rows behind the last page are in memory alone.
    print(session, (length + tokens) // layout.page_tokens * layout.page_tokens, flush=True)
"""


def write_and_kill(
    directory: Path, committed: dict[str, int], acknowledgements: int
) -> dict[str, int]:
    """Kill a writing child after so many turns; return the acknowledged lengths, whole pages."""
    arguments = [f"{session}={length}" for session, length in committed.items()]
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(kvstore.__file__).parents[1],
    )
    assert child.stdout is not None
    known = dict(committed)
    for _ in range(acknowledgements):
        session, length = child.stdout.readline().split()
        known[session] = int(length)
    child.send_signal(signal.SIGKILL)
    for line in child.stdout:
        session, length = line.split()
        known[session] = int(length)
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    return known


def require_own_rows(store: RowStore, session: str, length: int) -> None:
    expected = (torch.arange(length) * 2.0 + int(session)).view(1, 1, 1, -1, 1)
    rows = store.gather(session, torch.arange(length))
    assert torch.equal(rows, expected.expand(LAYOUT.rows_shape(length)))


def require_what_else_there_is(store: RowStore, session: str, length: int) -> None:
    """Require that pages which were not acknowledged are missing or have the session's rows."""
    page = LAYOUT.page_tokens
    more = range(length // page, length // page + 5)
    ids = [make_id(index, session) for index in more]
    for index, page_id, is_there in zip(more, ids, store.contains(ids), strict=True):
        if is_there:
            store.open("any", [page_id])
            rows = store.gather("any", torch.arange(page))
            expected = (torch.arange(page * index, page * (index + 1)) * 2.0 + int(session)).view(
                1, 1, 1, -1, 1
            )
            assert torch.equal(rows, expected.expand(LAYOUT.rows_shape(page)))
            store.close_session("any")


@pytest.mark.parametrize("rounds", [(3, 8, 25)])
def test_every_acknowledged_page_survives_kill_9(tmp_path: Path, rounds: tuple[int, ...]) -> None:
    committed: dict[str, int] = {}
    for acknowledgements in rounds:
        committed = write_and_kill(tmp_path / "rows", committed, acknowledgements)
        store = RowStore(LAYOUT, [RamTier(8 * LAYOUT.page_bytes), NvmeTier(tmp_path / "rows")])
        for session, length in committed.items():
            store.open(session, make_ids(range(length // LAYOUT.page_tokens), session))
            assert store.repair_pages(session) == []
            require_own_rows(store, session, length)
            require_what_else_there_is(store, session, length)
        store.check()
        store.close()
