"""The measurement of costs by the number of sessions, with few of them."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.scale.benchmark import BACKENDS, add_ratios, kept_rows
from benchmarks.scale.rows import measure_start
from benchmarks.scale.workers import simulated_workers
from kvrecall_server.reporting.results import Row, build_results
from services.cluster.grpc_client import GrpcWorkerClient
from services.cluster.settings import WireSettings

SIZES = ("10", "30")


@pytest.mark.parametrize("store", ["sqlite", "redis", "rows", "rows-redis"])
def test_every_operation_is_measured_at_each_size(store: str, tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    options = ["--workers", "2", "--gateways", "2", "--repetitions", "2", "--out", str(out)]
    assert main(["scale", "--stores", store, "--sizes", *SIZES, *options]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    conditions = {row["condition"] for row in rows}
    for size in SIZES:
        measured = [row for row in rows if row["sessions"] == int(size)]
        assert {row["condition"] for row in measured} == conditions
        assert all(row["median"] > 0 for row in measured if row["unit"] == "seconds")
    commands = [row["median"] for row in rows if row["metric"] == "Redis commands"]
    assert len(commands) == (len(SIZES) if store == "redis" else 0)
    assert all(each > 0 for each in commands)
    memory = [row["median"] for row in rows if row["metric"].startswith("memory")]
    assert len(memory) == len(SIZES)
    assert store in BACKENDS or all(each > 0 for each in memory)
    gateways = {row["gateways"] for row in rows if "gateways" in row}
    assert gateways == {"sqlite": {1}, "redis": {2}}.get(store, set())


async def test_every_simulated_worker_answers() -> None:
    with simulated_workers(3, None, "scale", 16) as found:
        clients = [GrpcWorkerClient(WireSettings(worker=address)) for address in found]
        for client, address in zip(clients, found, strict=True):
            assert [record.name for record in await client.workers()] == [address]
            await client.close()


def test_a_start_is_measured_by_the_pages_in_the_files(tmp_path: Path) -> None:
    row = measure_start(tmp_path / "files", 600)
    assert row["condition"] == "start: rows in files, 600 pages"
    assert row["sessions"] == 2
    assert row["median"] > 0


def test_a_start_is_measured_with_whole_sessions(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="700 pages are no multiple of 300"):
        measure_start(tmp_path / "files", 700)


def test_a_section_that_is_not_run_is_kept(tmp_path: Path) -> None:
    def row(condition: str) -> Row:
        return {"condition": condition, "metric": "m", "median": 1.0, "sessions": 10}

    start, usage, turn = row("start: 600 pages"), row("rows in files: usage"), row("SQLite: turn")
    file = tmp_path / "scale.json"
    build_results("scale", 0, "none", [start, usage, turn]).write(file)
    assert kept_rows(file, [row("rows in files: delete")]) == [start, turn]


def test_a_row_is_compared_with_the_fewest_sessions() -> None:
    def row(sessions: int, median: float) -> Row:
        return {"condition": "c", "metric": "m", "median": median, "sessions": sessions}

    compared = add_ratios([row(10, 2.0), row(100, 3.0)])
    assert [each["ratio"] for each in compared] == [1.0, 1.5]
    assert {each["ratio_to"] for each in compared} == {"10 sessions"}
    assert "ratio" not in add_ratios([row(10, -1.0), row(100, 3.0)])[1], "noise is no base"
