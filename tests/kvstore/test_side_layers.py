"""Pages with layers that are read apart, and with rows that are keys and values at once."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvstore.errors import ForeignPageError, RowRangeError, RowShapeError
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from tests.kvstore.stored_rows import read_all, write

PAGE = 4


def make_layout(
    side_layers: int = 0, *, latent: bool = False, page_tokens: int = PAGE
) -> PageLayout:
    return PageLayout(2, 3, 8, torch.float32, "f00d", page_tokens, side_layers, latent)


def open_store(layout: PageLayout, data: Path, codecs: Sequence[Codec] | None = None) -> RowStore:
    return RowStore(layout, [RamTier(1 << 20), NvmeTier(data)], codecs=codecs)


def draw(layout: PageLayout, tokens: int) -> Tensor:
    return torch.randn(layout.rows_shape(tokens), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=[(3, False), (0, True), (3, True)], ids=["side", "latent", "both"])
def layout(request: pytest.FixtureRequest) -> PageLayout:
    side_layers, latent = request.param
    return make_layout(side_layers, latent=latent)


@pytest.fixture
def stored(layout: PageLayout, tmp_path: Path) -> Iterator[tuple[RowStore, Tensor]]:
    """A store that was closed and opened again, and the rows of its session."""
    rows = draw(layout, 3 * PAGE)
    first = open_store(layout, tmp_path)
    pages = write(first, "a", rows)
    first.close()
    store = open_store(layout, tmp_path)
    store.open("a", pages)
    yield store, rows
    store.close()


@pytest.mark.parametrize("positions", [[1, 2, 3, 4, 5], [0, 7, 2, 11, -1]])
def test_a_selection_has_the_rows_of_the_first_layers(
    stored: tuple[RowStore, Tensor], positions: list[int]
) -> None:
    """As a run of tokens, which is read without an index for each row, and as any."""
    store, rows = stored
    wanted = torch.tensor(positions).expand(3, -1).contiguous()
    found = store.gather_selection("a", [wanted] * 2)
    assert len(found) == 2
    there = [at for at in positions if at >= 0]
    for layer, (keys, values) in enumerate(found):
        assert torch.equal(keys[:, : len(there)], rows[layer, 0][:, there])
        assert torch.equal(values[:, : len(there)], rows[layer, -1][:, there])


def test_side_layers_are_read_by_runs_of_tokens(stored: tuple[RowStore, Tensor]) -> None:
    store, rows = stored
    assert torch.equal(store.gather_side("a", 3, 9), rows[2:, :, :, 3:9])
    with pytest.raises(RowRangeError):
        store.gather_side("a", 3, 13)


def test_keys_are_those_of_the_first_layers(stored: tuple[RowStore, Tensor]) -> None:
    store, rows = stored
    assert torch.equal(store.read_keys("a", [1]).keys[0], rows[:2, 0, :, PAGE : 2 * PAGE])
    scanned = [keys for _, keys in store.scan_keys("a")]
    assert torch.equal(torch.cat(scanned, 2), rows[:2, 0])


def test_int8_keeps_all_layers_near(layout: PageLayout, tmp_path: Path) -> None:
    store = open_store(layout, tmp_path, [Codec.RAW, Codec.INT8])
    rows = draw(layout, PAGE)
    write(store, "a", rows)
    found = store.gather("a", torch.arange(PAGE))
    assert found.shape == rows.shape
    assert float((found - rows).abs().max()) < 0.05
    store.close()


def test_a_latent_takes_half_the_bytes() -> None:
    pair, latent = make_layout(), make_layout(latent=True)
    assert 2 * latent.token_bytes == pair.token_bytes


@pytest.mark.parametrize("other", [make_layout(2), make_layout(latent=True), make_layout(1)])
def test_pages_with_other_layers_are_foreign(other: PageLayout, tmp_path: Path) -> None:
    first = open_store(make_layout(), tmp_path)
    write(first, "a", draw(make_layout(), PAGE))
    first.close()
    with pytest.raises(ForeignPageError):
        open_store(other, tmp_path)


def test_a_page_has_at_most_255_side_layers() -> None:
    with pytest.raises(RowShapeError, match="255 side layers"):
        make_layout(256)


def test_a_page_that_is_dropped_is_deleted_and_later_ones_move_up(tmp_path: Path) -> None:
    layout = make_layout(latent=True, page_tokens=1)
    rows = draw(layout, 3)
    store = open_store(layout, tmp_path)
    first, second, third = write(store, "a", rows)
    store.drop_page("a", 1)
    assert store.flush("a")
    assert (store.length("a"), store.missing_pages("a")) == (2, [])
    assert torch.equal(read_all(store, "a"), rows[:, :, :, [0, 2]])
    assert store.contains([first, second, third]) == [True, False, True]
    with pytest.raises(RowRangeError, match="2 whole pages, got index 2"):
        store.drop_page("a", 2)
    store.close()
    store = open_store(layout, tmp_path)
    store.open("a", [first, second, third])
    assert store.missing_pages("a") == [1]
    store.restore("a", 1, rows[:, :, :, 1:2])
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    store.close()


def test_a_page_that_another_session_has_is_dropped_from_one_alone(tmp_path: Path) -> None:
    layout = make_layout(latent=True, page_tokens=1)
    rows = draw(layout, 3)
    store = open_store(layout, tmp_path)
    store.open("b", write(store, "a", rows))
    store.drop_page("a", 1)
    assert store.flush("a")
    assert torch.equal(read_all(store, "b"), rows)
    store.close()
