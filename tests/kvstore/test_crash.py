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

layout = PageLayout(2, 2, 16, torch.float32, "model A")
nvme = NvmeTier(Path(sys.argv[1]), segment_bytes=20 * layout.page_bytes)
store = RowStore(layout, [RamTier(8 * layout.page_bytes), nvme])
committed = dict(pair.split("=") for pair in sys.argv[2:])
for session in ("0", "1"):
    store.truncate(session, int(committed.get(session, 0)))
for turn in itertools.count():
    session = str(turn % 2)
    length = store.length(session)
    tokens = 7 + 31 * turn % 150
    values = torch.arange(length, length + tokens) * 2.0 + int(session)
    store.append(session, values.view(1, 1, 1, -1, 1).expand(layout.rows_shape(tokens)))
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


@pytest.mark.parametrize("rounds", [(3, 8, 25)])
def test_every_acknowledged_page_survives_kill_9(tmp_path: Path, rounds: tuple[int, ...]) -> None:
    committed: dict[str, int] = {}
    for acknowledgements in rounds:
        committed = write_and_kill(tmp_path / "rows", committed, acknowledgements)
        store = RowStore(LAYOUT, [RamTier(8 * LAYOUT.page_bytes), NvmeTier(tmp_path / "rows")])
        for session, length in committed.items():
            found = store.length(session)
            assert found >= length
            assert found % LAYOUT.page_tokens == 0
            require_own_rows(store, session, found)
            store.truncate(session, length)
            require_own_rows(store, session, length)
        store.check()
        store.close()
