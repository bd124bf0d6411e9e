"""The training run: it goes on where it was."""

from dataclasses import replace
from pathlib import Path

import torch

from reference.train import LENGTHS, Plan, Run


def plan(folder: Path, start_from: Path | None = None) -> Plan:
    return Plan(
        folder, folder / "export", 10 * 400, batch_tokens=400, compiled=False, start_from=start_from
    )


def weights(run: Run) -> list[torch.Tensor]:
    return [*(each.detach() for each in run.model.parameters()), *run.average]


def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    undisturbed = Run(plan(tmp_path / "undisturbed"))
    for _ in range(4):
        undisturbed.advance()
    first = Run(plan(tmp_path / "stopped"))
    for _ in range(2):
        first.advance()
    first.save()
    resumed = Run(plan(tmp_path / "stopped"))
    for _ in range(2):
        resumed.advance()
    assert resumed.progress.step == undisturbed.progress.step == 4
    assert resumed.progress.tokens == undisturbed.progress.tokens
    assert all(map(torch.equal, weights(resumed), weights(undisturbed)))
    assert not all(map(torch.equal, weights(resumed), weights(first)))


def test_a_run_ends_with_its_schedule_and_a_model_that_transformers_opens(tmp_path: Path) -> None:
    run = Run(replace(plan(tmp_path), n_tokens=3 * 2 * LENGTHS[0]))
    run.train(save_seconds=1e9)
    assert run.progress.step == 3
    continued = Run(plan(tmp_path / "other", start_from=tmp_path / "export"))
    assert all(map(torch.equal, weights(continued), [*run.average, *run.average]))
