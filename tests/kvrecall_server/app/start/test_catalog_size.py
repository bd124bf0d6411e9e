"""What `kvrecall size` says of the catalog is what was measured, and what a worker reports."""

import json
from pathlib import Path

import pytest

import benchmarks
from kvrecall_server.app.start.catalog_size import (
    IN_FILE,
    IN_REDIS,
    PACKED,
    CatalogBytes,
    count_kept,
    get_catalog_bytes,
)
from services.catalog.records import KeptState

RESULTS = Path(benchmarks.__file__).parent / "results" / "catalog.json"


def read_measured(store: str) -> dict[str, float]:
    """The medians of a store, by their metric."""
    rows = json.loads(RESULTS.read_text("utf-8"))["results"]
    return {row["metric"]: row["median"] for row in rows if row["condition"] == store}


@pytest.mark.parametrize(("store", "known"), [("SQLite", IN_FILE), ("one Redis", IN_REDIS)])
def test_the_constants_are_the_measured_ones(store: str, known: CatalogBytes) -> None:
    measured = read_measured(store)
    for what, value in vars(known).items():
        assert measured[f"of a {what}, without states"] == pytest.approx(value, rel=0.02)
    kept = measured["of its newest kept state"] / measured["of a session's current state"]
    assert kept < PACKED


@pytest.mark.parametrize("kept", [0, 1, 16, 20])
@pytest.mark.parametrize("turns", [1, 16, 17, 64, 200])
def test_states_are_counted_as_the_catalog_keeps_them(turns: int, kept: int) -> None:
    held = set[int]()
    for turn in range(1, turns + 1) if kept else ():
        held.add(turn)
        held.discard(KeptState(b"", kept).get_dropped(turn) or 0)
    assert count_kept(turns, kept) == len(held)


def test_a_session_has_what_its_turns_tokens_and_states_have() -> None:
    known = CatalogBytes(session=1000, turn=100, token=8.0)
    alone = get_catalog_bytes(known, state_bytes=0, turns=20, tokens=500, kept=16)
    assert alone == 1000 + 20 * 100 + 500 * 8
    one = get_catalog_bytes(known, state_bytes=10_000, turns=20, tokens=500, kept=0)
    assert one == alone + 10_000
    kept = get_catalog_bytes(known, state_bytes=10_000, turns=20, tokens=500, kept=16)
    assert kept == one + round(16 * PACKED * 10_000)
