"""Copies in host memory of rows that no model has computed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageKey, PageLayout
from kvstore.format.page_table import PageVersion
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


def add_rows(copy: HostCopy, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add the first rows to a copy, per layer keys and values `[n_kv_heads, n, head_dim]`."""
    layout = copy.layout
    length = layers[0][0].shape[1]
    parts = [torch.stack(pair[: layout.parts]) for pair in layers]
    pages = [
        join_page(layout, [part[:, :, first : first + layout.page_tokens] for part in parts])
        for first in range(0, length, layout.page_tokens)
    ]
    versions = [PageVersion(PageKey("made up", index), 1) for index in range(len(pages))]
    copy.append(versions, pages, length)


def join_page(layout: PageLayout, layers: Sequence[Tensor]) -> Tensor:
    """Join a page of rows, per layer `[parts, n_kv_heads, t, head_dim]`."""
    page = torch.full(layout.rows_shape(layout.page_tokens), torch.nan, dtype=layout.dtype)
    page[: len(layers), :, :, : layers[0].shape[2]] = torch.stack(list(layers))
    return page
