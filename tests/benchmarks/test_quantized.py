"""The benchmark of quantized weights, on the reference model."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.quantized import BATCHES, FORMS, agreement, divergence, main
from kvrecall.reporting.results import read_results

LOGITS = torch.tensor([[0.1, 0.9, -2.0], [3.0, 0.0, 1.0]])


def test_equal_distributions_are_not_apart() -> None:
    expected = LOGITS.log_softmax(-1)
    assert divergence(expected, (LOGITS + 5).log_softmax(-1)).abs().max() < 1e-6
    assert agreement(expected, expected).tolist() == [1, 1]


def test_divergence_is_in_nats() -> None:
    expected = torch.tensor([[0.5, 0.25, 0.25]])
    found = torch.tensor([[0.25, 0.5, 0.25]])
    assert divergence(expected.log(), found.log()).item() == pytest.approx(0.25 * 0.6931, rel=1e-3)
    assert agreement(expected.log(), found.log()).tolist() == [0]


def test_a_run_reports_speed_and_quality_of_every_form(tmp_path: Path) -> None:
    turns = [
        {"speaker": name, "dia_id": f"D1:{index}", "text": "The river is north of the garden."}
        for index, name in enumerate(("Ada", "Ben") * 8)
    ]
    conversation = {"speaker_a": "Ada", "speaker_b": "Ben", "session_1": turns}
    data = tmp_path / "talk.json"
    data.write_text(json.dumps([{"sample_id": "talk", "conversation": conversation, "qa": []}]))
    out = tmp_path / "found.json"
    options = "--model reference --name reference --tokens 60 --context 40 --steps 1 --prefills 1"
    main([*options.split(), "--data", str(data), "--out", str(out)])
    rows = read_results(out).results
    speeds = [row for row in rows if row.get("metric") == "speed"]
    assert len(speeds) == (len(BATCHES) + 1) * len(FORMS)
    assert {row["ratio_to"] for row in speeds} == {"float32"}
    means = {row["condition"]: row["mean"] for row in rows if "mean" in row}
    assert len(means) == 2 * (len(FORMS) - 1)
    divergences = [means[f"mean KL from float32, nats: {name}"] for name in list(FORMS)[1:]]
    assert 0 <= divergences[0] < divergences[2]  # bfloat16, 4 bits
