"""A session's rows are the same from every tier, for any codecs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import TierSettingsError
from kvstore.format.codec import Codec, decode_page, encode_page
from kvstore.format.page import PageKey, PageLayout, parse_header
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

RAW = Codec.RAW
INT8 = Codec.INT8
MakeRows = Callable[..., Tensor]


def read_all(store: RowStore, session: str = "a") -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


def expected_rows(layout: PageLayout, rows: Tensor) -> Tensor:
    """Rows as an INT8 store returns them: finished pages decoded, the unfinished one exact."""
    pages = []
    for page in rows.split(layout.page_tokens, 3):
        codec = INT8 if page.shape[3] == layout.page_tokens else RAW
        blob = encode_page(layout, PageKey("a", 0), 1, page.contiguous(), codec)
        pages.append(decode_page(layout, parse_header(blob), blob))
    return torch.cat(pages, 3)


def get_codecs(tier: RamTier | NvmeTier) -> list[int]:
    return [header.codec for header in sorted(tier.stored(), key=lambda header: header.key)]


@pytest.mark.parametrize("codecs", [[RAW, INT8], [INT8, INT8]])
def test_rows_are_the_same_from_memory_and_every_tier_and_after_a_restart(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path, codecs: list[Codec], blocked_tier: Any
) -> None:
    rows = make_rows(21)
    expected = expected_rows(layout, rows)
    assert not torch.equal(expected, rows)
    assert torch.equal(expected[:, :, :, 16:], rows[:, :, :, 16:])
    queued = RowStore(layout, [RamTier(1 << 20), blocked_tier], codecs=codecs)
    queued.append("a", rows)
    assert torch.equal(read_all(queued), expected)
    blocked_tier.release.set()
    queued.close()
    ram = RamTier(1 << 20)
    store = RowStore(layout, [ram, NvmeTier(tmp_path / "rows")], codecs=codecs)
    for token in range(21):
        store.append("a", rows[:, :, :, token : token + 1])
    assert torch.equal(read_all(store), expected)
    store.flush("a")
    assert get_codecs(ram) == [codecs[0], codecs[0]]
    assert torch.equal(read_all(store), expected)
    store.close()
    for _ in ("cold", "warm"):
        again = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")], codecs=codecs)
        assert torch.equal(read_all(again), expected[:, :, :, :16])
        assert torch.equal(read_all(again), expected[:, :, :, :16])
        again.check()
        again.close()


def test_a_promoted_page_has_the_codec_of_each_tier(
    layout: PageLayout, make_rows: MakeRows
) -> None:
    upper = RamTier(1 << 20, "upper")
    middle = RamTier(1 << 20, "middle")
    lowest = RamTier(1 << 20, "lowest")
    store = RowStore(layout, [upper, middle, lowest], codecs=[RAW, INT8, INT8])
    store.append("a", make_rows(16))
    store.flush("a")
    blobs = lowest.get([PageKey("a", 0), PageKey("a", 1)])
    for tier in (upper, middle):
        tier.delete([PageKey("a", 0), PageKey("a", 1)])
    read = read_all(store)
    assert (get_codecs(upper), get_codecs(middle)) == ([RAW, RAW], [INT8, INT8])
    assert middle.get([PageKey("a", 0), PageKey("a", 1)]) == blobs
    lowest.delete([PageKey("a", 0), PageKey("a", 1)])
    assert torch.equal(read_all(store), read)
    upper.delete([PageKey("a", 0), PageKey("a", 1)])
    assert torch.equal(read_all(store), read)
    store.close()


def test_pages_are_read_by_the_codec_of_their_header(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    rows = make_rows(24)
    expected = torch.cat(
        [rows[:, :, :, :8], expected_rows(layout, rows[:, :, :, 8:16]), rows[:, :, :, 16:]], 3
    )
    for first, codecs in ((0, [RAW, RAW]), (8, [RAW, INT8]), (16, [RAW, RAW])):
        store = RowStore(layout, [RamTier(1 << 20), NvmeTier(tmp_path / "rows")], codecs=codecs)
        store.append("a", rows[:, :, :, first : first + 8])
        store.close()
    for codecs in ([INT8, INT8], [RAW, RAW]):
        ram = RamTier(1 << 20)
        store = RowStore(layout, [ram, NvmeTier(tmp_path / "rows")], codecs=codecs)
        assert torch.equal(read_all(store), expected)
        assert torch.equal(read_all(store), expected)
        assert get_codecs(ram) == [RAW, codecs[0], RAW]
        store.close()


def test_int8_pages_take_about_half_the_bytes(tmp_path: Path) -> None:
    layout = PageLayout(2, 2, 64, torch.bfloat16, "model A")
    rows = torch.randn(
        layout.rows_shape(640), generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    store = RowStore(layout, [RamTier(1 << 24), NvmeTier(tmp_path / "rows")], codecs=[RAW, INT8])
    store.append("a", rows)
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
