"""The share of a model's weights that are no linear layers of their own, or are read as such."""

import structlog
from torch import nn

from workers.model.layers.experts import find_expert_weights
from workers.model.layers.latent import find_read_weights

_log = structlog.get_logger(__name__)


def log_share_left(model: nn.Module, event: str) -> None:
    """Log the share of a model's numbers that are experts' or latents' projections, if it has any.

    These stay as they are where linear layers are replaced. To be called before that.
    """
    left = {
        "experts": sum(weight.numel() for weight in find_expert_weights(model)),
        "latents": sum(part.weight.numel() for part in find_read_weights(model)),
    }
    if any(left.values()):
        total = sum(weight.numel() for weight in model.parameters())
        shares = {name: round(count / total, 3) for name, count in left.items() if count}
        _log.warning(event, share=round(sum(left.values()) / total, 3), **shares)
