"""The optimizer of the training run."""

import torch

from reference.muon import Muon, orthogonalize


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 24, 64), (3, 64, 24)):
        updates = torch.randn(shape)
        values = torch.linalg.svdvals(orthogonalize(updates))
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_steps_are_those_of_torchs_muon_but_for_its_rounding() -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((48, 32), (48, 32), (16, 32))]
    ours, theirs = ([each.clone().requires_grad_() for each in start] for _ in range(2))
    optimizers = (
        Muon(ours, lr=0.02),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other, before in zip(ours, theirs, start, strict=True):
        moved = (other - before).norm()
        assert moved > 0.1
        assert (mine - other).norm() < 0.03 * moved


def test_a_closure_computes_the_gradients_and_the_loss() -> None:
    matrix = torch.eye(4, requires_grad=True)

    def closure() -> float:
        matrix.sum().backward()
        return float(matrix.detach().sum())

    assert Muon([matrix], lr=0.02).step(closure) == 4.0
    assert not torch.equal(matrix.detach(), torch.eye(4))
