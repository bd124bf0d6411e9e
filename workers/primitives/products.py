"""Products of matrices on CPUs with and without instructions for bfloat16; logits in float32."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, cpu


def cpu_has_bfloat16() -> bool:
    """Check if oneDNN computes in bfloat16 with instructions that this CPU has."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (available and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    # On x86 oneDNN says so of every CPU with AVX-512, and without these emulates them: prompts take
    # several times as long as in float32.
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not x86 or any((cpu._is_avx512_bf16_supported(), cpu._is_amx_tile_supported()))


def compute_logits(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Compute `scale * queries @ keys^T`, float32 `[n, q, rows]`.

    The product of two bfloat16 numbers is exact in float32, and sums are in float32. So a CPU with
    instructions for bfloat16 computes the same from such rows in a third of the time.

    queries: `[n, q, d]`; keys: `[n, rows, d]`.
    """
    both = queries.dtype == keys.dtype == torch.bfloat16 and keys.device.type == "cpu"
    nothing = torch.zeros(1, device=keys.device)
    with _bfloat16_products() if both else nullcontext():
        return torch.baddbmm(nothing, queries.float(), keys.float().mT, beta=0, alpha=scale)


@contextmanager
def _bfloat16_products() -> Iterator[None]:
    """Let oneDNN round the factors of float32 products to bfloat16, in all threads, where that pays."""
    backend = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        backend.fp32_precision = before
