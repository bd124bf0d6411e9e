"""The benchmark of repairs, on reproducible synthetic keys."""

from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.repair import (
    CONTRAST,
    COPY,
    PAGES,
    PLAIN,
    Plan,
    double,
    exponent,
    measure,
    open_bench,
)
from benchmarks.repair_keys import SINKS, SyntheticKeys
from kvrecall_server.reporting.results import read_results
from workers.cache.active_cache import KVShape
from workers.methods.repairkv import RepairKV

KEYS = SyntheticKeys(
    KVShape(n_layers=4, n_heads=8, n_kv_heads=4, head_dim=32),
    torch.bfloat16,
    seed=3,
    signal_tokens=4,
)


def joined(tokens: int) -> torch.Tensor:
    return torch.cat(list(KEYS.keys(tokens)), dim=2)


def test_synthetic_keys_do_not_depend_on_their_number() -> None:
    keys = joined(2500)
    assert keys.shape == (4, 4, 2500, 32)
    assert torch.equal(joined(1100), keys[:, :, :1100])
    assert not torch.equal(
        keys, torch.cat(list(SyntheticKeys(KEYS.shape, KEYS.dtype, seed=4).keys(2500)), dim=2)
    )


def test_sinks_get_much_of_the_attention_and_needles_some() -> None:
    with open_bench(KEYS, 4096) as bench:
        scores = bench.plain().scores
    assert scores[:SINKS].sum() > 0.3
    needles = torch.tensor(
        [start + token for start in range(700, 4000, 1500) for token in range(6)]
    )
    assert scores[needles].mean() > 2 * scores[SINKS:].mean()


def test_every_scan_selects_the_same_and_reads_its_share() -> None:
    with open_bench(KEYS, 4096) as bench:
        operator = RepairKV()
        plain = bench.repair(bench.plain, operator, 12)
        pages = bench.repair(lambda: bench.scan(PAGES), operator, 12)
        first, later = (bench.repair(lambda: bench.scan(COPY), operator, 12) for _ in range(2))
        assert torch.allclose(bench.plain().scores, bench.scan(PAGES).scores, atol=1e-6)
        candidate_bytes = bench.candidate_bytes
    assert plain.chosen.tolist() == pages.chosen.tolist()
    assert pages.chosen.tolist() == first.chosen.tolist() == later.chosen.tolist()
    assert len(plain.chosen) == 12
    assert plain.bytes_read == later.bytes_read == 0
    assert candidate_bytes < first.bytes_read < 1.1 * candidate_bytes
    assert 1.9 * candidate_bytes < pages.bytes_read < 2.1 * candidate_bytes
    assert pages.seconds["total"] == sum(pages.seconds[part] for part in ("scan", "select", "move"))


def test_rows_have_every_part_and_a_growth() -> None:
    rows = list(measure(KEYS, Plan(promoted=12, repeats=1), [256, 512]))
    parts = {(row["condition"], row["metric"]) for row in rows}
    for method in (PLAIN, PAGES, COPY, f"{PAGES}{CONTRAST}", f"{COPY}{CONTRAST}"):
        for metric in ("scan", "select", "move", "total"):
            assert (f"512 candidates: {method}", metric) in parts
        assert (f"{method}, 256 to 512 candidates", "exponent of growth") in parts
    read = [row for row in rows if row["metric"] == "bytes read"]
    assert [row["same_choice_as_pages"] for row in read] == [True] * 8


def test_sizes_double_and_growth_is_the_slope() -> None:
    assert list(double(4096, 20_000)) == [4096, 8192, 16_384]
    assert exponent({n: 3e-6 * n**1.25 for n in (4096, 8192, 65_536)}) == pytest.approx(1.25)


def test_the_script_writes_a_result_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "repair.json"
    sizes = [
        "--smallest",
        "128",
        "--largest",
        "128",
        "--layers",
        "1",
        "--repeats",
        "1",
    ]
    assert main(["repair", *sizes, "--out", str(out)]) == 0
    written = read_results(out)
    assert written.suite == "repair"
    assert {row["candidates"] for row in written.results} == {128}
