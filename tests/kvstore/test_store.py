"""A row store returns every row that was appended, from any tier, and refuses the others."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor

from kvstore.errors import (
    CorruptPageError,
    MissingPageError,
    RowRangeError,
    RowShapeError,
    StoreClosedError,
)
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from tests.kvstore.stored_rows import append, name_pages, open_session, read_all

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


@pytest.mark.parametrize("steps", [[1] * 30, [30], [7, 1, 8, 14], [8, 16, 6]])
def test_rows_are_the_same_for_any_split_of_appends(
    open_store: OpenStore, make_rows: MakeRows, steps: list[int]
) -> None:
    store = open_store()
    rows = make_rows(30)
    done = 0
    for step in steps:
        done += step
        assert append(store, "a", rows[:, :, :, done - step : done]) == done
    assert torch.equal(read_all(store, "a"), rows)
    store.check()


def test_gather_accepts_positions_in_any_order_and_repeated(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(50)
    append(store, "a", rows)
    positions = torch.tensor([49, 0, 17, 17, 8, 7, 30])
    assert torch.equal(store.gather("a", positions), rows[:, :, :, positions])
    assert store.gather("a", torch.empty(0, dtype=torch.int64)).shape == rows[:, :, :, :0].shape


def test_a_selection_has_its_own_positions_per_layer_and_head(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store(ram_pages=2)
    rows = make_rows(61)
    append(store, "a", rows)
    generator = torch.Generator().manual_seed(3)
    selection = [torch.randint(-1, 61, (2, size), generator=generator) for size in (5, 0, 40)]
    gathered = store.gather_selection("a", selection)
    for layer, positions in enumerate(selection):
        present = (positions >= 0)[:, :, None]
        for side in (0, 1):
            expected = (
                torch.stack([rows[layer, side, head][positions[head]] for head in range(2)])
                * present
            )
            assert torch.equal(gathered[layer][side], expected)
            assert torch.equal(store.gather_heads("a", layer, positions)[side], expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 61), (0, 16), (5, 7), (12, 40), (60, 61)])
def test_the_same_run_of_tokens_in_all_heads_is_gathered_as_their_positions(
    start: int, stop: int, open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store(ram_pages=2)
    rows = make_rows(61)
    append(store, "a", rows)
    run = torch.arange(start, stop).repeat(2, 1)
    for layer, gathered in enumerate(store.gather_selection("a", [run] * 3)):
        for side in (0, 1):
            expected = rows[layer, side, :, start:stop]
            assert torch.equal(gathered[side], expected)
            assert torch.equal(store.gather_heads("a", layer, run)[side], expected)


def test_a_selection_reads_every_page_once(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store(ram_pages=100)
    append(store, "a", make_rows(80))
    store.flush("a")
    before = store.tiers()["ram"].counters.hits
    store.gather_selection("a", [torch.arange(80).repeat(2, 1)] * 3)
    assert store.tiers()["ram"].counters.hits - before == 10


def test_a_scan_yields_keys_page_by_page(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(45)
    append(store, "a", rows)
    pieces = list(store.scan_keys("a", 3, 42))
    assert [first for first, _ in pieces] == [3, 8, 16, 24, 32, 40]
    assert torch.equal(torch.cat([keys for _, keys in pieces], 2), rows[:, 0, :, 3:42])
    assert list(store.scan_keys("a", 5, 5)) == []


def test_the_store_copies_appended_rows(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(12)
    given = rows.clone()
    append(store, "a", given)
    given.zero_()
    read_all(store, "a").zero_()
    for _, keys in store.scan_keys("a"):
        keys.zero_()
    assert torch.equal(read_all(store, "a"), rows)


def test_pages_beyond_the_ram_limit_are_read_from_below_and_promoted(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store(ram_pages=3)
    rows = make_rows(80)
    append(store, "a", rows)
    store.flush("a")
    assert store.usage() == {"ram": 3 * layout.page_bytes, "nvme": 10 * layout.page_bytes}
    first = torch.arange(8)
    assert torch.equal(store.gather("a", first), rows[:, :, :, :8])
    before = store.tiers()["nvme"].counters.hits
    assert torch.equal(store.gather("a", first), rows[:, :, :, :8])
    assert store.tiers()["nvme"].counters.hits == before > 0


def test_a_scan_promotes_nothing(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store(ram_pages=3)
    append(store, "a", make_rows(80))
    store.flush("a")
    written = store.tiers()["ram"].counters.written_bytes
    assert sum(keys.shape[2] for _, keys in store.scan_keys("a")) == 80
    assert store.tiers()["ram"].counters.written_bytes == written


def test_threads_read_flush_and_delete_while_rows_are_appended(
    open_store: OpenStore, layout: PageLayout
) -> None:
    store = open_store(ram_pages=3, segment_bytes=20_000)
    failures: list[BaseException] = []
    done: list[bool] = []

    def numbered(first: int, tokens: int) -> Tensor:
        return (
            torch.arange(first, first + tokens)
            .float()
            .view(1, 1, 1, -1, 1)
            .expand(layout.rows_shape(tokens))
        )

    def guarded(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not done:
                    work()
            except BaseException as error:
                failures.append(error)

        return run

    def read() -> None:
        positions = torch.randint(store.length("a"), (20,))
        assert torch.equal(store.gather("a", positions)[2, 1, 1, :, 3], positions.float())

    def scan() -> None:
        assert all(keys[0, 0, 0, 0] == first for first, keys in store.scan_keys("a"))

    def come_and_go() -> None:
        append(store, "b", numbered(1, 21))
        store.flush("b")
        store.close_session("b")
        store.delete(name_pages(numbered(1, 21), layout.page_tokens)).result()

    append(store, "a", numbered(0, 1))
    threads = [
        Thread(target=guarded(work))
        for work in (read, read, scan, come_and_go, lambda: store.flush("a"))
    ]
    for thread in threads:
        thread.start()
    for first in range(1, 800):
        append(store, "a", numbered(first, 1))
    done.append(True)
    for thread in threads:
        thread.join()
    assert failures == []
    store.close_session("b")
    assert torch.equal(read_all(store, "a"), numbered(0, 800))
    store.check()


def test_a_corrupt_page_is_an_error_and_its_neighbours_are_readable(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout, tmp_path: Path
) -> None:
    store = open_store()
    rows = make_rows(40)
    append(store, "a", rows)
    store.close()
    (segment,) = (tmp_path / "rows").glob("segment-*.kv")
    raw = bytearray(segment.read_bytes())
    raw[2 * layout.page_bytes + 300] ^= 1
    segment.write_bytes(raw)
    again = open_store()
    open_session(again, "a", rows)
    assert again.missing_pages("a") == []
    assert torch.equal(again.gather("a", torch.tensor([15, 24])), rows[:, :, :, [15, 24]])
    damaged = name_pages(rows, layout.page_tokens)[2]
    with pytest.raises(CorruptPageError, match=f"page {damaged.hex()}"):
        read_all(again, "a")
    again.close_session("a")
    open_session(again, "a", rows)
    assert again.missing_pages("a") == [2], "it was found damaged"


def test_a_missing_page_is_an_error(layout: PageLayout, make_rows: MakeRows) -> None:
    tier = RamTier(1 << 20)
    store = RowStore(layout, [tier])
    rows = make_rows(20)
    append(store, "a", rows)
    store.flush("a")
    tier.delete([name_pages(rows, layout.page_tokens)[1]])
    with pytest.raises(MissingPageError):
        read_all(store, "a")
    store.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.gather("a", torch.tensor([10])),
        lambda store: store.gather("a", torch.tensor([-1])),
        lambda store: store.gather("unknown", torch.tensor([0])),
        lambda store: store.gather_heads("a", 0, torch.tensor([[0], [-2]])),
        lambda store: store.truncate("a", 16),
        lambda store: store.truncate("a", -8),
        lambda store: list(store.scan_keys("a", 0, 11)),
    ],
)
def test_positions_outside_the_session_are_refused(
    open_store: OpenStore, make_rows: MakeRows, ask: Callable[[RowStore], object]
) -> None:
    store = open_store()
    append(store, "a", make_rows(10))
    with pytest.raises(RowRangeError):
        ask(store)
    assert store.sessions() == ["a"]


@pytest.mark.parametrize("length", [1, 7, 20, 21])
def test_a_length_inside_a_page_is_refused(
    open_store: OpenStore, make_rows: MakeRows, length: int
) -> None:
    store = open_store()
    rows = make_rows(21)
    append(store, "a", rows)
    with pytest.raises(RowRangeError, match=f"truncate session 'a' to {length} tokens"):
        store.truncate("a", length)
    assert torch.equal(read_all(store, "a"), rows), "a refused call changes nothing"
    store.check()


@pytest.mark.parametrize(
    ("end", "length"),
    [
        (lambda store: store.open("a", store.page_ids("a", [0, 1])), 16),
        (lambda store: store.open("a", store.page_ids("a", [0])), 8),
        (lambda store: store.truncate("a", 16), 16),
        (lambda store: store.truncate("a", 8), 8),
    ],
)
def test_rows_behind_the_last_page_are_readable_until_the_session_is_opened_or_truncated(
    open_store: OpenStore, make_rows: MakeRows, end: Callable[[RowStore], None], length: int
) -> None:
    store = open_store()
    rows = make_rows(21)
    other = make_rows(6, seed=1)
    append(store, "a", rows[:, :, :, :18])
    assert store.flush("a")
    append(store, "a", rows[:, :, :, 18:])
    assert torch.equal(read_all(store, "a"), rows)
    assert torch.equal(store.read_keys("a", [2]).keys[0], rows[:, 0, :, 16:])
    end(store)
    with pytest.raises(RowRangeError):
        store.gather("a", torch.tensor([length]))
    assert append(store, "a", other) == length + 6
    assert torch.equal(read_all(store, "a"), torch.cat([rows[:, :, :, :length], other], 3))
    store.check()


def test_rows_that_are_not_final_are_read_and_never_written(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(40)
    append(store, "a", rows[:, :, :, :19])
    assert store.append("a", rows[:, :, :, 19:], final=False) == 40
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    assert store.usage()["nvme"] == 2 * store.layout.page_bytes
    with pytest.raises(RowRangeError):
        store.truncate("a", 24)
    store.truncate("a", 16)
    assert append(store, "a", rows[:, :, :, 16:]) == 40
    assert store.flush("a")
    assert torch.equal(read_all(store, "a"), rows)
    assert store.usage()["nvme"] == 5 * store.layout.page_bytes
    store.check()


@pytest.mark.parametrize(
    "ask",
    [
        lambda store, rows: store.append("a", rows.half()),
        lambda store, rows: store.append("a", rows[:2]),
        lambda store, rows: store.append("a", rows[0]),
        lambda store, rows: store.append("a", rows, [bytes(16)] * 2),
        lambda store, rows: store.append("a", torch.cat([rows, rows], 3)),
        lambda store, rows: store.gather("a", torch.tensor([0.0])),
        lambda store, rows: store.gather_heads("a", 3, torch.tensor([[0], [0]])),
        lambda store, rows: store.gather_heads("a", 0, torch.tensor([[0]])),
        lambda store, rows: store.gather_selection("a", [torch.tensor([[0], [0]])]),
    ],
)
def test_tensors_of_a_wrong_shape_are_refused(
    open_store: OpenStore, make_rows: MakeRows, ask: Callable[[RowStore, Tensor], object]
) -> None:
    store = open_store()
    rows = make_rows(5)
    append(store, "a", rows)
    with pytest.raises(RowShapeError):
        ask(store, rows)
    assert (store.sessions(), store.length("a")) == (["a"], 5)


def test_a_closed_store_refuses_calls(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    store.close()
    with pytest.raises(StoreClosedError):
        append(store, "a", make_rows(1))
