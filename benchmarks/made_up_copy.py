"""Copies in host memory of rows that no model has computed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrecall.domain.page_ids import PageId, make_random_id
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.buffers import empty_rows
from kvstore.format.page import PageLayout
from workers.native.attention import NativeAttention
from workers.retrieval.host_copy import HostCopy


def build_copy(
    layout: PageLayout,
    settings: Retrieval | None,
    layers: Sequence[tuple[Tensor, Tensor]],
    native: NativeAttention | None = None,
) -> HostCopy:
    """Build a copy of rows, as `add_rows`, and index them."""
    copy = HostCopy(layout, settings, native)
    add_rows(copy, layers)
    for _ in copy.index_rows():
        pass
    return copy


def make_ids(layout: PageLayout, start: int, rows: int) -> list[PageId]:
    """Make ids of the pages that `rows` rows fill which follow the first `start` ones."""
    filled = (start % layout.page_tokens + rows) // layout.page_tokens
    return [make_random_id() for _ in range(filled)]


def add_rows(copy: HostCopy, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add the first rows to a copy, per layer keys and values `[n_kv_heads, n, head_dim]`."""
    layout = copy.layout
    length = layers[0][0].shape[1]
    parts = [torch.stack(pair[: layout.parts]) for pair in layers]
    firsts = range(0, length, layout.page_tokens)
    # In one piece, as those of the RAM tier are.
    shape = (len(firsts), *layout.rows_shape(layout.page_tokens))
    pages = list(empty_rows(shape, layout.dtype).fill_(torch.nan))
    for page, first in zip(pages, firsts, strict=True):
        for layer, part in enumerate(parts):
            some = part[:, :, first : first + layout.page_tokens]
            page[layer, :, :, : some.shape[2]] = some
    copy.append([make_random_id() for _ in pages], pages, length)
