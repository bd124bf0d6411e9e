"""The benchmarks of a GPU, in small sizes on whatever there is."""

from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.gpu import COPY, PARTS, TINY, TRANSFORMERS
from kvrecall_server.reporting.results import read_results


def run(*arguments: str) -> None:
    assert main(["gpu", *arguments]) == 0


def test_one_command_measures_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the files of the tiers
    run("--tiny", "--out", str(tmp_path / "gpu.json"))
    rows = read_results(tmp_path / "gpu.json").results
    assert all(
        row["median"] > 0
        for row in rows
        if row["metric"] not in ("bytes read", "exponent of growth")
    )
    decode = [row for row in rows if row["metric"] == "decode"]
    turns = [row for row in decode if row["condition"].startswith("turn after")]
    assert len(turns) == 6 * len(TINY.recalls)
    by_subject = {row["condition"]: row for row in decode if row not in turns}
    names = [TRANSFORMERS, "kvrecall, full", f"kvrecall, budget {TINY.budget}"]
    conditions = [f"one session of {n} tokens" for n in TINY.contexts]
    conditions += [f"{n} sessions of {TINY.batch_context} tokens" for n in TINY.batches]
    assert list(by_subject) == [f"{each}: {name}" for each in conditions for name in names]
    assert all(row["n"] == TINY.steps for row in by_subject.values())
    assert {row["candidates"] for row in rows if "candidates" in row} == {128, 256}
    (swap,) = [row for row in rows if row["condition"] == "swap-in of 100 tokens: swap-in"]
    assert swap["ratio_to"] == COPY
    assert {"reference, ram: tier", "reference, nvme: tier"} <= {row["condition"] for row in rows}


def test_some_parts_are_measured_alone(tmp_path: Path) -> None:
    run("--tiny", "--parts", "swaps", "--out", str(tmp_path / "gpu.json"))
    rows = read_results(tmp_path / "gpu.json").results
    assert {row["metric"] for row in rows} == {"copy"}
    assert set(PARTS) == {"attention", "decode", "batches", "recall", "repair", "swaps", "tiers"}


def test_without_a_gpu_only_small_sizes_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        run()
    assert "--tiny" in capsys.readouterr().err
