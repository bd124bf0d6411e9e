"""Whole steps at a small size: every arm, and its ratio to the full cache."""

from pathlib import Path

import pytest
import torch

from benchmarks.decode_steps import (
    BUDGET,
    FULL,
    FULL_TORCH,
    NATIVE,
    TORCH,
    Steps,
    choose_kept,
    load,
    step_rows,
)
from tests.workers.native_build import build_native, open_native
from workers.native.attention import NativeAttention


def test_a_step_is_timed_in_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = open_native(build_native(tmp_path))
    monkeypatch.setattr(NativeAttention, "open", lambda *_: native)
    subject = load("reference")
    rows = list(step_rows(subject, Steps(rows=600, batch=2, budget=64, steps=2, seed=0)))
    found = {row["condition"].partition(": ")[2]: row for row in rows}
    assert set(found) == {FULL, FULL_TORCH, BUDGET, TORCH, NATIVE}
    assert all(row["median"] > 0 and row["n"] == 2 for row in rows)
    assert {name for name, row in found.items() if "ratio" in row} == set(found) - {FULL}


def test_the_first_and_the_newest_rows_are_kept() -> None:
    assert choose_kept(100, 8).tolist() == [0, 1, 2, 3, 96, 97, 98, 99]
    assert torch.equal(choose_kept(5, 8), torch.arange(5))
