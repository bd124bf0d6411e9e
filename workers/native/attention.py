"""Attention of a decode step over active and drawn rows, in native code."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.native.call import Call
from workers.native.heads import Heads
from workers.native.library import open_library
from workers.native.searched import Searched
from workers.native.searched_rows import SearchedRows

# Numbers of searched keys that are worth a thread: starting one takes as long as scoring so many.
_NUMBERS_PER_THREAD = 1 << 18
# Arrays of floats end at a multiple of it: the vectors of attend.cpp.
_LANES = 8


class NativeAttention:
    """One call a layer: search, draw and attention of all sessions and heads of a step.

    What is drawn, and how drawn rows count, is defined by `workers.retrieval.sampling`; the results
    are the same. For one thread at a time.

    Attributes:
        level: Instructions that it was compiled for: baseline, avx2 or avx512.
    """

    def __init__(self, level: str, library: ctypes.CDLL, rotations: int) -> None:
        """Take the functions of a library; rotations: ranks are rotated by less than that."""
        self.level = level
        self._rotations = rotations
        self._functions = {
            torch.float32: library.attend_float32,
            torch.bfloat16: library.attend_bfloat16,
        }
        for function in self._functions.values():
            function.argtypes = [ctypes.POINTER(Call)]
            function.restype = None
        self._scratch = torch.empty(0)

    @classmethod
    def open(cls, rotations: int) -> "NativeAttention | None":
        """Open the code that was built for this CPU; None where none was, or it is of another system."""
        level, library = open_library(torch.backends.cpu.get_cpu_capability())
        return None if level is None or library is None else cls(level, library, rotations)

    def takes(
        self,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        searched: Sequence[SearchedRows | None],
    ) -> bool:
        """True for arguments that `attend` computes: on a CPU, of one token, in float32 or bfloat16."""
        keys, values, positions = rows
        return (
            queries.device.type == "cpu"
            and queries.dtype in self._functions
            and queries.dtype == keys.dtype == values.dtype
            and all(map(_is_dense, (queries, keys, values)))
            and positions.stride(2) == 1
            and (mask is None or mask.shape[2:] == (1, keys.shape[2]))
            and all(each is None or each.memory.dtype == keys.dtype for each in searched)
        )

    def attend(
        self,
        queries: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        searched: Sequence[SearchedRows | None],
        *,
        rotation: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attend to a layer's active rows, and to those that are drawn of each session's searched ones.

        queries: `[B, n_kv_heads, group, head_dim]`. rows: active keys and values
        `[B, n_kv_heads, n, head_dim]`, and their positions int32 `[B, n_kv_heads, n]`. mask: is added
        to active rows' logits, `[B or 1, n_kv_heads or 1, 1, n]`. searched: of each session; None for one
        that retrieves nothing. rotation: of the layer's ranks, beside that of the newest position.

        Returns the output as `queries`, and what was drawn, int32 `[B, n_kv_heads, 1 + count]`: how many
        rows, and their positions, -1 for none.
        """
        batch, heads, group, dim = queries.shape
        active = rows[0].shape[2]
        retrieving = [each for each in searched if each is not None]
        most = max(each.count for each in retrieving)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        drawn = torch.empty(batch, heads, 1 + most, dtype=torch.int32)
        lengths = [each.length for each in retrieving]
        threads = _count_threads(batch * heads, heads * dim * sum(lengths))
        size = _count_scratch(active, most, max(lengths), group, dim)
        if len(self._scratch) < threads * size:
            self._scratch = torch.empty(threads * size)
        added = None if mask is None else mask[:, :, 0].float().expand(batch, heads, active)
        call = Call(
            *map(Heads.of, (queries, *rows)),
            Heads() if added is None else Heads.of(added),
            (Searched * batch)(*map(_describe, searched)),
            *(rotation, self._rotations),
            *(batch, heads, group, dim, active),
            *(out.data_ptr(), drawn.data_ptr(), most),
            *(self._scratch.data_ptr(), size, threads),
            scale,
        )
        self._functions[queries.dtype](call)
        return out, drawn


def _is_dense(rows: Tensor) -> bool:
    """True if each head's rows, `[..., n, head_dim]`, lie one after the other."""
    # torch gives a single row any stride.
    return rows.stride(3) == 1 and (rows.shape[2] == 1 or rows.stride(2) == rows.shape[3])


def _describe(rows: SearchedRows | None) -> Searched:
    if rows is None:
        return Searched()
    keys, memory = rows.memory.data_ptr(), rows.memory
    values = keys + (len(memory) - 1) * memory.stride(0) * memory.itemsize
    return Searched(keys, values, rows.ranks.data_ptr(), memory.shape[2], rows.length, rows.count)


def _count_threads(heads: int, numbers: int) -> int:
    """Threads that are worth their start for so many heads, and numbers of keys in all."""
    return max(1, min(torch.get_num_threads(), heads, numbers // _NUMBERS_PER_THREAD))


def _count_scratch(active: int, most: int, longest: int, group: int, dim: int) -> int:
    """Floats that one thread of `attend_head` needs."""
    joint = _pad(active + most)
    return 2 * group * dim + most + group * joint + (group + 2) * _pad(longest)


def _pad(n: int) -> int:
    return -(-n // _LANES) * _LANES
