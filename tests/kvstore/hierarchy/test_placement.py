"""A session's rows are the same from every tier, for any codecs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import TierSettingsError
from kvstore.format.codec import Codec, decode_page, encode_page
from kvstore.format.page import PageId, PageLayout, parse_header
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.failing_files import FaultyTier
from tests.kvstore.stored_rows import append, name_pages, read_all

RAW = Codec.RAW
INT8 = Codec.INT8
MakeRows = Callable[..., Tensor]


def expected_rows(layout: PageLayout, rows: Tensor) -> Tensor:
    """Rows as an INT8 store returns them: finished pages decoded, the unfinished one exact."""
    pages = []
    for page in rows.split(layout.page_tokens, 3):
        if page.shape[3] == layout.page_tokens:
            blob = encode_page(layout, bytes(16), page.contiguous(), INT8, written_at=1)
            page = decode_page(layout, parse_header(blob), blob)
        pages.append(page)
    return torch.cat(pages, 3)


def get_codecs(tier: RamTier | NvmeTier, ids: Sequence[PageId]) -> list[int]:
    codecs = {header.id: header.codec for header in tier.stored()}
    return [codecs[page_id] for page_id in ids]


@pytest.mark.parametrize("codecs", [[RAW, INT8], [INT8, INT8]])
def test_rows_are_the_same_from_memory_and_every_tier_and_after_a_restart(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, codecs: list[Codec], blocked_tier: Any
) -> None:
    rows = make_rows(21)
    expected = expected_rows(layout, rows)
    assert not torch.equal(expected, rows)
    assert torch.equal(expected[:, :, :, 16:], rows[:, :, :, 16:])
    queued = RowStore(layout, [RamTier(1 << 20), blocked_tier], codecs=codecs)
    append(queued, "a", rows)
    assert torch.equal(read_all(queued, "a"), expected)
    blocked_tier.release.set()
    queued.close()
    ram = RamTier(1 << 20)
    store = RowStore(layout, [ram, NvmeTier(tmp_path / "rows")], codecs=codecs)
    for token in range(21):
        append(store, "a", rows[:, :, :, token : token + 1])
    assert torch.equal(read_all(store, "a"), expected)
    store.flush("a")
    ids = name_pages(rows, layout.page_tokens)
    assert get_codecs(ram, ids) == [codecs[0], codecs[0]]
    assert torch.equal(read_all(store, "a"), expected)
    store.close()
    for _ in ("cold", "warm"):
        again = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")], codecs=codecs)
        again.open("a", ids)
        assert torch.equal(read_all(again, "a"), expected[:, :, :, :16])
        assert torch.equal(read_all(again, "a"), expected[:, :, :, :16])
        again.check()
        again.close()


def test_a_promoted_page_has_the_codec_of_each_tier(
    layout: PageLayout, make_rows: MakeRows
) -> None:
    upper = RamTier(1 << 20, "upper")
    middle = RamTier(1 << 20, "middle")
    lowest = RamTier(1 << 20, "lowest")
    store = RowStore(layout, [upper, middle, lowest], codecs=[RAW, INT8, INT8])
    append(store, "a", make_rows(16))
    store.flush("a")
    ids = name_pages(make_rows(16), layout.page_tokens)
    blobs = lowest.get(ids)
    for tier in (upper, middle):
        tier.delete(ids)
    read = read_all(store, "a")
    assert (get_codecs(upper, ids), get_codecs(middle, ids)) == ([RAW, RAW], [INT8, INT8])
    assert middle.get(ids) == blobs
    lowest.delete(ids)
    assert torch.equal(read_all(store, "a"), read)
    upper.delete(ids)
    assert torch.equal(read_all(store, "a"), read)
    store.close()


def test_pages_are_read_by_the_codec_of_their_header(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    rows = make_rows(24)
    expected = torch.cat(
        [rows[:, :, :, :8], expected_rows(layout, rows[:, :, :, 8:16]), rows[:, :, :, 16:]], 3
    )
    ids = name_pages(rows, layout.page_tokens)
    for first, codecs in ((0, [RAW, RAW]), (8, [RAW, INT8]), (16, [RAW, RAW])):
        store = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")], codecs=codecs)
        store.open("a", ids[: first // 8])
        append(store, "a", rows[:, :, :, first : first + 8])
        store.close()
    for codecs in ([INT8, INT8], [RAW, RAW]):
        ram = RamTier(1 << 20)
        store = RowStore(layout, [ram, NvmeTier(tmp_path / "rows")], codecs=codecs)
        store.open("a", ids)
        assert torch.equal(read_all(store, "a"), expected)
        assert torch.equal(read_all(store, "a"), expected)
        assert get_codecs(ram, ids) == [RAW, codecs[0], RAW]
        store.close()


def test_int8_pages_take_about_half_the_bytes(tmp_path: Path) -> None:
    layout = PageLayout(2, 2, 64, torch.bfloat16, "model A")
    rows = torch.randn(
        layout.rows_shape(640), generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    store = RowStore(layout, [RamTier(1 << 24), NvmeTier(tmp_path / "rows")], codecs=[RAW, INT8])
    append(store, "a", rows)
    store.flush("a")
    used = store.usage()
    assert used["ram"] == 10 * layout.page_bytes
    assert used["nvme"] <= 0.55 * used["ram"]
    store.close()


@pytest.mark.parametrize("codecs", [[INT8, RAW, RAW], [RAW, INT8, RAW], [INT8, INT8, RAW]])
def test_a_tier_less_exact_than_the_one_below_is_refused(
    layout: PageLayout, codecs: list[Codec]
) -> None:
    tiers = [RamTier(1 << 20, name) for name in ("a", "b", "c")]
    with pytest.raises(TierSettingsError, match="c: RAW; set INT8 in the lowest tier too"):
        RowStore(layout, tiers, codecs=codecs)


def test_a_page_that_the_lowest_tier_has_got_meanwhile_is_not_put_there_again(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    lowest = FaultyTier(tmp_path / "rows")
    store = RowStore(layout, [RamTier(1 << 20), lowest])
    rows = make_rows(8)
    lowest.fails = "writes"
    append(store, "a", rows)
    assert not store.flush("a")
    (page_id,) = name_pages(rows, layout.page_tokens)
    NvmeTier.put(lowest, [(page_id, encode_page(layout, page_id, rows, written_at=1))])
    lowest.fails = ""
    assert store.flush("a")
    assert store.count_pending() == (0, 0)
    assert store.tiers()["nvme"].counters.written_bytes == 0
    store.close()
