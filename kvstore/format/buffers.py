"""New memory for rows: tensors whose first touch is cheap.

numpy asks the kernel for large pages, torch does not: for rows of megabytes, the first touch of small pages costs more
than the copy itself.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def empty_rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor with anything in it."""
    return torch.from_numpy(np.empty(shape, dtype=f"i{dtype.itemsize}")).view(dtype)


def zero_rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros."""
    return torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype)
