"""The benchmark of hybrids: two models of one size, the same passes, and what is left of a turn."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.hybrid.arm import (
    AGAIN,
    BESIDE,
    COMPUTED,
    COPIES,
    OVERHEAD,
    PLAIN,
    SERVICE,
    STATE_BYTES,
    STATES,
    WRITES,
)
from benchmarks.hybrid.benchmark import Plan, build_rows
from benchmarks.hybrid.models import DENSE, HYBRID, build_models, count_parameters
from benchmarks.hybrid.plain_model import Pass, PlainModel


def test_the_models_are_of_one_size() -> None:
    sizes = [count_parameters(each) for each in build_models(256, 300, 1).values()]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


@pytest.mark.parametrize("name", [HYBRID, DENSE])
def test_plain_passes_go_back_to_where_a_pass_begins(name: str) -> None:
    module = build_models(256, 300, 1)[name]
    tokens = tuple(range(20, 60))
    plain = PlainModel(module)
    plain.run([Pass(0, tokens[:32]), Pass(32, (3,)), Pass(33, (4,)), Pass(32, tokens[32:])])
    again = PlainModel(module)
    again.run([Pass(0, tokens[:32]), Pass(32, tokens[32:])])
    assert plain.cache.get_seq_length(3) == 40
    for held, expected in zip(plain.cache.layers, again.cache.layers, strict=True):
        states = (getattr(layer, "recurrent_states", {}).get(0) for layer in (held, expected))
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_ratios_are_medians_of_pairs() -> None:
    found = {
        HYBRID: {SERVICE: [2.0, 6.0], COPIES: [0.1, 0.1]},
        DENSE: {SERVICE: [1.0, 2.0]},
    }
    rows = build_rows(64, Plan(), found)
    assert [(row["metric"], row.get("ratio"), row["n"]) for row in rows] == [
        (SERVICE, 2.5, 2),
        (COPIES, None, 2),
        (SERVICE, None, 2),
    ]


def test_a_short_run_accounts_for_each_turn(tmp_path: Path) -> None:
    out = tmp_path / "hybrid.json"
    sizes = [
        "--prompts",
        "100",
        "--turns",
        "1",
        "--sessions",
        "2",
        "--answer",
        "4",
        "--hidden",
        "256",
    ]
    assert main(["hybrid", *sizes, "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    hybrid = {row["metric"]: row for row in rows if row["condition"].startswith(f"{HYBRID},")}
    dense = {row["metric"]: row for row in rows if row["condition"].startswith(f"{DENSE},")}
    assert {COPIES, WRITES, STATES, STATE_BYTES}.isdisjoint(dense)
    assert dense[BESIDE]["median"] == dense[OVERHEAD]["median"]
    for metrics in (hybrid, dense):
        assert metrics[SERVICE]["n"] == 2
        assert metrics[PLAIN]["median"] > 0
        # The prompt, the answer but for its last token, and what was pending before.
        assert 100 <= metrics[COMPUTED]["median"] <= 100 + 4 + 64 + 64
        assert 0 <= metrics[AGAIN]["median"] < 2 * 64
    assert hybrid[STATES]["median"] >= 1
    assert hybrid[STATE_BYTES]["median"] > hybrid[STATES]["median"] * 100_000
