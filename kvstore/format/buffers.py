"""Allocation of memory for rows.

numpy asks the kernel for huge pages, torch does not. For rows of megabytes the page faults of small
pages cost more than the copy itself, so tensors are allocated through numpy. With a GPU they are
pinned, so that it copies them directly; torch keeps and reuses such memory.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def empty_rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate an uninitialised tensor."""
    if torch.cuda.is_available():
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.from_numpy(np.empty(shape, dtype=f"i{dtype.itemsize}")).view(dtype)


def zero_rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor of zeros."""
    if torch.cuda.is_available():
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    return torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype)
