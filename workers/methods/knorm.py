"""Key norm: keys of small norm."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workers.methods.base import LayerRows, Method


@dataclass(frozen=True)
class KNorm(Method):
    """Negative L2 norm of a key: keys of small norm attract attention.

    Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
    (2024), section 3.

    Deviations: the paper does not compress the first two layers; here every layer has its budget,
    as in kvpress.
    """

    name: ClassVar[str] = "knorm"

    def scores(self, rows: LayerRows) -> Tensor:
        """Negative Euclidean norm, in float32."""
        lengths: Tensor = torch.linalg.vector_norm(rows.keys.float(), dim=-1)
        return -lengths
