"""Experts of a mixture: which of transformers' implementations computes them, and where their weights are."""

from collections.abc import Iterator

import structlog
from torch import nn
from transformers import PreTrainedModel

_log = structlog.get_logger(__name__)

GROUPED = "grouped_mm"


def choose_experts(model: PreTrainedModel) -> None:
    """Have the experts of a mixture computed by grouped products, and log what computes them.

    Other implementations wait for the device in each layer, or compute experts that no token takes. Where
    a class does not support grouped products its own code runs, and the log says why. Of a dense model
    nothing is logged.
    """
    experts = list(_find_experts(model))
    if not experts:
        return
    refused = _ask_for_grouped(model)
    runs = sorted({_name_implementation(each) for each in experts})
    why = "" if runs == [GROUPED] else f", not {GROUPED}: {refused}"
    _log.info("experts", runs=f"{', '.join(runs)}{why}")


def find_expert_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Find the weights of experts that are no linear layers: tensors that have those of several experts."""
    for each in _find_experts(module):
        for part in each.modules():
            if not isinstance(part, nn.Linear):
                yield from (weight for weight in part.parameters(recurse=False) if weight.dim() > 1)


def _find_experts(module: nn.Module) -> Iterator[nn.Module]:
    """Find the modules that have the routed experts of a layer, by transformers' name for them."""
    for name, part in module.named_modules():
        if name.rpartition(".")[2] == "experts":
            yield part


def _ask_for_grouped(model: PreTrainedModel) -> str:
    """Ask the model, and those within it: a wrapper's class may not support what its text's does.

    Returns the refusal of the innermost model that refuses, or an empty text.
    """
    refused = ""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and any(_find_experts(part)):
            try:
                part.set_experts_implementation(GROUPED)
            except ValueError as error:
                refused = str(error)
    return refused


def _name_implementation(experts: nn.Module) -> str:
    """Name what computes a layer's experts: a choice of transformers, or their class with code of its own."""
    config = getattr(experts, "config", None)
    if config is None or not hasattr(experts, "is_transposed"):
        return type(experts).__name__
    return str(config._experts_implementation)
