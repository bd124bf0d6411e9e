"""Attention of a decode step over active and drawn rows, in native code."""

import ctypes
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.index.key_codes import code_bytes, code_shapes, split_codes
from kvstore.index.paged_rows import PagedRows
from workers.native.call import Call
from workers.native.encode import Encode
from workers.native.gather import Gather
from workers.native.heads import Heads
from workers.native.library import open_library
from workers.native.searched import Searched
from workers.native.searched_rows import SearchedRows
from workers.native.summarise import Summarise
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.positions.seen_rows import SeenRows

# Numbers of searched keys that are worth a thread: starting one takes as long as scoring so many.
_NUMBERS_PER_THREAD = 1 << 18


class NativeAttention:
    """One call a layer: search, draw and attention of all sessions and heads of a step.

    What is drawn, and how drawn rows count, is defined by `workers.retrieval.sampling`; the results
    are the same. For one thread at a time.

    Attributes:
        level: Instructions that it was compiled for: baseline, avx2 or avx512.
    """

    def __init__(
        self, level: str, library: ctypes.CDLL, rotations: int, group: Group = Alone()
    ) -> None:
        """Take the functions of a library; rotations: ranks are rotated by less than that.

        group: of the processes that have the other heads.
        """
        self.level = level
        self._rotations = rotations
        self._processes = group
        self._functions = {
            torch.float32: library.attend_float32,
            torch.bfloat16: library.attend_bfloat16,
        }
        for function in self._functions.values():
            function.argtypes = [ctypes.POINTER(Call)]
            function.restype = None
        self._encode = {
            torch.float32: library.encode_float32,
            torch.bfloat16: library.encode_bfloat16,
        }
        for encode in self._encode.values():
            encode.argtypes = [ctypes.POINTER(Encode)]
            encode.restype = None
        self._summarise = {
            torch.float32: library.summarise_float32,
            torch.bfloat16: library.summarise_bfloat16,
        }
        for summarise in self._summarise.values():
            summarise.argtypes = [ctypes.POINTER(Summarise)]
            summarise.restype = None
        self._count_scratch = library.attend_scratch
        self._count_scratch.argtypes = [ctypes.POINTER(Call)]
        self._count_scratch.restype = ctypes.c_int64
        self._gather = library.gather_rows
        self._gather.argtypes = [ctypes.POINTER(Gather)]
        self._gather.restype = None
        self._scratch = torch.empty(0)

    @property
    def dtypes(self) -> Collection[torch.dtype]:
        """Number formats of the rows that it searches."""
        return self._functions.keys()

    @classmethod
    def open(cls, rotations: int, group: Group = Alone()) -> "NativeAttention | None":
        """Open the code that was built for this CPU; None where none was, or it is of another system."""
        level, library = open_library(torch.backends.cpu.get_cpu_capability())
        return None if level is None or library is None else cls(level, library, rotations, group)

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
            and all(each is None or each.rows.layout.dtype == keys.dtype for each in searched)
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
        batch, heads, _, _ = queries.shape
        active = rows[0].shape[2]
        out = torch.empty(queries.shape, dtype=queries.dtype)
        added = None if mask is None else mask[:, :, 0].float().expand(batch, heads, active)
        keys, values, positions = map(Heads.of, rows)
        parts = (keys, values, positions, Heads() if added is None else Heads.of(added))
        drawn = self._call(queries, parts, active, searched, rotation, scale, out=out)
        return out, drawn

    def draw(
        self,
        queries: Tensor,
        active: Tensor,
        searched: SearchedRows,
        *,
        rotation: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Draw rows of one session, without attention, as `Retriever.search`.

        queries: `[n_kv_heads, group, head_dim]`, on the host; active: int32 positions `[n_kv_heads, n]`.
        Returns positions, int64 `[n_kv_heads, r]`, -1 for none, and their bias, float32 of that shape.
        """
        asked = queries[None].to(searched.rows.layout.dtype).contiguous()
        positions = active[None].contiguous()
        parts = (Heads(), Heads(), Heads.of(positions), Heads())
        counts = torch.empty(1, len(queries), searched.count)
        drawn = self._call(
            asked, parts, active.shape[1], [searched], rotation, scale, counts=counts
        )[0]
        none = torch.arange(searched.count) >= drawn[:, :1]
        return drawn[:, 1:].long(), counts[0].log_().masked_fill_(none, -torch.inf)

    def gather(
        self, rows: PagedRows, layer: int, positions: Tensor, *, values: bool = False
    ) -> Tensor:
        """Gather keys of a layer, or `values`, `[n_kv_heads, m, head_dim]`.

        positions: int64 `[n_kv_heads, m]`, each of a row.
        """
        heads, count = positions.shape
        out = torch.empty(heads, count, rows.layout.head_dim, dtype=rows.layout.dtype)
        positions = positions.contiguous()
        row_bytes = rows.layout.head_dim * rows.layout.dtype.itemsize
        part = find_parts(rows.layout, layer)[values]
        self._gather(
            Gather(
                *(rows.addresses.data_ptr(), part, rows.layout.page_tokens, row_bytes),
                *(heads, count, positions.data_ptr(), out.data_ptr()),
            )
        )
        return out

    def encode_keys(self, layout: PageLayout, rows: Tensor) -> Tensor:
        """Encode the keys of a page's rows, to the bits of `kvstore.index.key_codes.encode_keys`."""
        encoded = torch.zeros(code_bytes(layout), dtype=torch.uint8)
        scales, codes = split_codes(layout, encoded)
        self._encode[layout.dtype](
            Encode(
                *(rows.data_ptr(), layout.n_layers, layout.parts, layout.n_kv_heads),
                *(layout.page_tokens, layout.head_dim, scales.data_ptr(), codes.data_ptr()),
            )
        )
        return encoded

    def summarise_keys(
        self, rows: PagedRows, layer: int, described: Tensor, before: int, length: int
    ) -> None:
        """Make the summaries of a layer's keys from row `before` to `length`: a `Fill` of `KeySummaries`."""
        layout = rows.layout
        self._summarise[layout.dtype](
            Summarise(
                *(rows.addresses.data_ptr(), find_parts(layout, layer)[0], layout.page_tokens),
                *(layout.n_kv_heads, layout.head_dim, described.data_ptr(), before, length),
            )
        )

    def _call(
        self,
        queries: Tensor,
        parts: tuple[Heads, Heads, Heads, Heads],
        active: int,
        searched: Sequence[SearchedRows | None],
        rotation: int,
        scale: float,
        *,
        out: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Call the function for the queries' numbers; returns what was drawn."""
        batch, heads, group, dim = queries.shape
        retrieving = [each for each in searched if each is not None]
        most = max(each.count for each in retrieving)
        drawn = torch.empty(batch, heads, 1 + most, dtype=torch.int32)
        call = Call(
            *(Heads.of(queries), *parts),
            (Searched * batch)(*map(describe_searched, searched, map(_get_seen, searched))),
            *(rotation, self._rotations),
            *(batch, heads, group, dim, active),
            *(heads * self._processes.index, heads * self._processes.count),
            *(None if each is None else each.data_ptr() for each in (out, counts, drawn)),
            most,
            scale=scale,
        )
        call.threads = _count_threads(
            batch * heads, heads * dim * sum(each.scored for each in retrieving)
        )
        call.scratch_size = self._count_scratch(call)
        if len(self._scratch) < call.threads * call.scratch_size:
            self._scratch = torch.empty(call.threads * call.scratch_size)
        call.scratch = self._scratch.data_ptr()
        self._functions[queries.dtype](call)
        return drawn


def _is_dense(rows: Tensor) -> bool:
    """True if each head's rows, `[..., n, head_dim]`, lie one after the other."""
    # torch gives a single row any stride.
    return rows.stride(3) == 1 and (rows.shape[2] == 1 or rows.stride(2) == rows.shape[3])


def describe_searched(searched: SearchedRows | None, seen: SeenRows | None) -> Searched:
    """Describe a session's rows of a layer for a call; None: there are none.

    seen: how they are seen, and active ones, from behind the model's window.
    """
    described = Searched() if searched is None else _describe_rows(searched)
    if seen is not None:
        described.starts, described.shifts = seen.starts.data_ptr(), seen.shifts.data_ptr()
        described.segments = seen.count
    if searched is not None and searched.turned is not None:
        described.turned = searched.turned.data_ptr()
        described.segment_step, described.head_step = searched.turned.stride()[:2]
    return described


def _describe_rows(searched: SearchedRows) -> Searched:
    rows, summaries = searched.rows, searched.summaries
    keys, values = find_parts(rows.layout, searched.layer)
    described = Searched(
        *(rows.addresses.data_ptr(), keys, values),
        *(searched.codes.data_ptr(), *find_codes(rows.layout, searched.layer)),
        ranks=searched.ranks.data_ptr(),
        page_rows=rows.layout.page_tokens,
        rows=rows.length,
        count=searched.count,
    )
    if summaries is not None:
        described.summaries = summaries.described[searched.layer].data_ptr()
        described.levels, described.top = summaries.described.shape[1], summaries.top
        described.nodes, described.level_rotation = summaries.nodes, summaries.level_rotation
    return described


def _get_seen(searched: SearchedRows | None) -> SeenRows | None:
    return None if searched is None else searched.seen


def find_parts(layout: PageLayout, layer: int) -> tuple[int, int]:
    """Bytes from a page's begin to a layer's keys and to its values, which may be the same."""
    part = layout.n_kv_heads * layout.page_tokens * layout.head_dim * layout.dtype.itemsize
    keys = layer * layout.parts * part
    return keys, keys if layout.latent else keys + part


def find_codes(layout: PageLayout, layer: int) -> tuple[int, int]:
    """Bytes from the begin of a page's codes to a layer's scales and to its codes of keys."""
    scales, codes = code_shapes(layout)
    scale_bytes = torch.float32.itemsize * math.prod(scales[1:])
    return layer * scale_bytes, layout.n_layers * scale_bytes + layer * math.prod(codes[1:])


def _count_threads(heads: int, numbers: int) -> int:
    """Threads that are worth their start for so many heads, and numbers of keys in all."""
    return max(1, min(torch.get_num_threads(), heads, numbers // _NUMBERS_PER_THREAD))
