"""Compiles the kernels for a GPU that need not be here: `python -m tests.workers.kernels.compile_kernels 80 bf16 128`.

Triton's interpreter takes what its compiler refuses. Prints a JSON object: of each kernel the bytes of machine code
and those of shared memory. A program of its own, since triton either interprets or compiles in a process.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.kernels.attend import attend
from workers.kernels.draw import draw
from workers.kernels.operator import choose_sizes
from workers.kernels.score import score
from workers.kernels.weigh import weigh

KERNELS: dict[str, Any] = {"score": score, "weigh": weigh, "draw": draw, "attend": attend}
# Types of arguments that are not whole numbers of 32 bits; those in `ROWS` have the rows' numbers.
ROWS = ("queries", "keys", "values", "mask", "out")
TYPES = {
    **dict.fromkeys(("positions", "drawn", "lasts"), "*i32"),
    **dict.fromkeys(("logits", "largest", "sums", "weights", "ranks", "shares"), "*fp32"),
    "table": "*i64",
    "marks": "*i8",
    "scale": "fp32",
}


def compile_kernel(name: str, capability: int, kind: str, dim: int) -> tuple[int, int]:
    """Compile a kernel for rows of numbers of a kind; returns bytes of machine code and of shared memory."""
    sizes = choose_sizes(heads=4, group=7, dim=dim, page_rows=64, splits=128)[name]
    if name == "attend":
        sizes["masked"] = True
    kernel = KERNELS[name]
    types = TYPES | dict.fromkeys(ROWS, f"*{kind}")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
    signature |= dict.fromkeys(constants, "constexpr")
    # As the launcher finds it for tensors of torch.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, type_of in enumerate(signature.values())
        if type_of.startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return len(compiled.asm["cubin"]), compiled.metadata.shared


if __name__ == "__main__":
    _, wanted, numbers, channels = sys.argv
    found = {each: compile_kernel(each, int(wanted), numbers, int(channels)) for each in KERNELS}
    print(json.dumps(found))
