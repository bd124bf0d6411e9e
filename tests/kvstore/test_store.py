"""The row store gives back every row it was given, wherever its page is, and nothing else."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore.errors import (
    CorruptPageError,
    ForeignPageError,
    MissingPageError,
    RowRangeError,
    RowShapeError,
    StoreClosedError,
    TierFullError,
)
from kvstore.format.codec import encode_page
from kvstore.format.page import PageKey, PageLayout
from kvstore.store import RowStore
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier

OpenStore = Callable[..., RowStore]
MakeRows = Callable[..., Tensor]


def until(done: Callable[[], object], what: str, seconds: float = 20) -> None:
    last = monotonic() + seconds
    while not done():
        assert monotonic() < last, f"not within {seconds} s: {what}"
        sleep(0.005)


def everything(store: RowStore, session: str) -> Tensor:
    return store.gather(session, torch.arange(store.length(session)))


@pytest.mark.parametrize("steps", [[1] * 30, [30], [7, 1, 8, 14], [8, 16, 6]])
def test_rows_come_back_however_they_were_appended(
    open_store: OpenStore, make_rows: MakeRows, steps: list[int]
) -> None:
    store = open_store()
    rows = make_rows(30)
    done = 0
    for step in steps:
        done += step
        assert store.append("a", rows[:, :, :, done - step : done]) == done
    assert torch.equal(everything(store, "a"), rows)
    store.check()


def test_gather_takes_positions_in_any_order_and_more_than_once(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(50)
    store.append("a", rows)
    positions = torch.tensor([49, 0, 17, 17, 8, 7, 30])
    assert torch.equal(store.gather("a", positions), rows[:, :, :, positions])
    assert store.gather("a", torch.empty(0, dtype=torch.int64)).shape == rows[:, :, :, :0].shape


def test_a_selection_gives_each_layer_and_head_its_own_rows(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store(ram_pages=2)
    rows = make_rows(61)
    store.append("a", rows)
    generator = torch.Generator().manual_seed(3)
    selection = [torch.randint(-1, 61, (2, size), generator=generator) for size in (5, 0, 40)]
    gathered = store.gather_selection("a", selection)
    for layer, positions in enumerate(selection):
        present = (positions >= 0)[:, :, None]
        for side in (0, 1):
            wanted = (
                torch.stack([rows[layer, side, head][positions[head]] for head in range(2)])
                * present
            )
            assert torch.equal(gathered[layer][side], wanted)
            assert torch.equal(store.gather_heads("a", layer, positions)[side], wanted)


def test_a_selection_reads_every_page_once(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store(ram_pages=100)
    store.append("a", make_rows(80))
    store.flush("a")
    before = store.counters()["ram"].hits
    store.gather_selection("a", [torch.arange(80).repeat(2, 1)] * 3)
    assert store.counters()["ram"].hits - before == 10


def test_scan_gives_keys_page_by_page(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(45)
    store.append("a", rows)
    pieces = list(store.scan_keys("a", 3, 42))
    assert [first for first, _ in pieces] == [3, 8, 16, 24, 32, 40]
    assert torch.equal(torch.cat([keys for _, keys in pieces], 2), rows[:, 0, :, 3:42])
    assert list(store.scan_keys("a", 5, 5)) == []


def test_the_store_keeps_copies(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    rows = make_rows(12)
    given = rows.clone()
    store.append("a", given)
    given.zero_()
    everything(store, "a").zero_()
    for _, keys in store.scan_keys("a"):
        keys.zero_()
    assert torch.equal(everything(store, "a"), rows)


def test_rows_are_readable_while_their_pages_are_on_the_way(
    layout: PageLayout,
    make_rows: MakeRows,
    held_tier: Any,
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), held_tier])
    rows = make_rows(45)
    store.append("a", rows)
    assert torch.equal(everything(store, "a"), rows)
    assert store.usage() == {"ram": 0, "held": 0}
    store.truncate("a", 20)
    store.append("a", rows[:, :, :, :9])
    wanted = torch.cat([rows[:, :, :, :20], rows[:, :, :, :9]], 3)
    assert torch.equal(everything(store, "a"), wanted)
    held_tier.release.set()
    store.flush("a")
    store.check()
    assert torch.equal(everything(store, "a"), wanted)
    store.close()


def test_flushed_rows_survive_a_restart(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout, tmp_path: Path
) -> None:
    store = open_store()
    rows = make_rows(43)
    store.append("a", rows)
    store.append("b", rows[:, :, :, :5])
    store.flush("a")
    store.flush("b")
    shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    copy = open_store(directory=tmp_path / "copy")
    assert (copy.sessions(), copy.length("a"), copy.length("b")) == (["a", "b"], 43, 5)
    assert torch.equal(everything(copy, "a"), rows)
    assert copy.append("a", rows[:, :, :, :10]) == 53
    assert torch.equal(everything(copy, "a"), torch.cat([rows, rows[:, :, :, :10]], 3))
    copy.check()


def test_rows_of_a_turn_that_was_not_committed_are_dropped_after_a_restart(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    rows = make_rows(60)
    store.append("a", rows[:, :, :, :29])
    store.flush("a")
    store.append("a", rows[:, :, :, 29:])
    store.close()
    again = open_store()
    other = make_rows(20, seed=9)
    assert again.length("a") == 60
    again.truncate("a", 29)
    again.append("a", other)
    wanted = torch.cat([rows[:, :, :, :29], other], 3)
    assert torch.equal(everything(again, "a"), wanted)
    again.close()
    third = open_store()
    assert torch.equal(everything(third, "a"), wanted)
    third.check()


@pytest.mark.parametrize("length", [0, 1, 8, 15, 16, 20, 21])
def test_a_truncated_length_survives_a_restart(
    open_store: OpenStore, make_rows: MakeRows, length: int
) -> None:
    store = open_store()
    rows = make_rows(21)
    store.append("a", rows)
    store.flush("a")
    store.truncate("a", length)
    store.flush("a")
    store.close()
    again = open_store()
    assert again.length("a") == length
    assert torch.equal(everything(again, "a"), rows[:, :, :, :length])
    again.check()


def test_pages_over_the_ram_limit_are_read_from_below_and_promoted(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store(ram_pages=3)
    rows = make_rows(80)
    store.append("a", rows)
    store.flush("a")
    assert store.usage() == {"ram": 3 * layout.page_bytes, "nvme": 10 * layout.page_bytes}
    first = torch.arange(8)
    assert torch.equal(store.gather("a", first), rows[:, :, :, :8])
    before = store.counters()["nvme"].hits
    assert torch.equal(store.gather("a", first), rows[:, :, :, :8])
    assert store.counters()["nvme"].hits == before > 0


def test_a_scan_leaves_the_warm_pages_where_they_are(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store(ram_pages=3)
    store.append("a", make_rows(80))
    store.flush("a")
    written = store.counters()["ram"].written_bytes
    assert sum(keys.shape[2] for _, keys in store.scan_keys("a")) == 80
    assert store.counters()["ram"].written_bytes == written


def test_prefetched_pages_are_read_from_memory(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store(ram_pages=8)
    rows = make_rows(80)
    store.append("a", rows)
    store.append("b", rows)
    assert store.flush("a")
    assert store.flush("b")
    for _ in range(2):
        store.prefetch("a")
    store.prefetch("unknown")
    hot = [PageKey("a", index) for index in range(6, 10)]
    until(
        lambda: all(store._stack.tiers.all[0].contains(hot)),
        "half of the memory holds the last pages",
    )
    before = store.counters()["nvme"].hits
    assert torch.equal(store.gather("a", torch.arange(48, 80)), rows[:, :, :, 48:])
    assert store.counters()["nvme"].hits == before


def test_calls_of_tiers_are_counted_timed_and_their_errors_too(
    layout: PageLayout, make_rows: MakeRows, held_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), held_tier])
    held_tier.release.set()
    held_tier.failing = True
    store.append("a", make_rows(8))
    assert not store.flush("a")
    held_tier.failing = False
    assert store.flush("a")
    store.gather("a", torch.arange(8))
    ram = store.counters()["ram"]
    held = store.counters()["held"]
    assert held.errors > 0
    assert held.writes > held.errors
    assert held.write_seconds > 0
    assert (ram.errors, ram.hits) == (0, 1)
    assert ram.reads > 0
    assert ram.read_seconds > 0
    store.close()


def test_dropping_every_session_leaves_no_byte(
    open_store: OpenStore, make_rows: MakeRows, tmp_path: Path
) -> None:
    store = open_store(segment_bytes=4000)
    for session in "abc":
        store.append(session, make_rows(50))
        store.flush(session)
    assert len(list((tmp_path / "rows").glob("segment-*"))) > 3
    store.close()
    store = open_store(segment_bytes=4000)
    store.append("d", make_rows(3))
    assert store.retain_only(["b", "never seen"]) == ["a", "c"]
    assert store.sessions() == ["b", "d"]
    store.delete("d")
    store.delete("b")
    store.delete("b")
    assert store.usage() == {"ram": 0, "nvme": 0}
    assert len(list((tmp_path / "rows").glob("segment-*"))) == 1
    store.check()


def test_a_dropped_session_may_come_again_with_other_rows(
    open_store: OpenStore, make_rows: MakeRows
) -> None:
    store = open_store()
    store.append("a", make_rows(40))
    store.flush("a")
    store.delete("a")
    assert store.length("a") == 0
    rows = make_rows(20, seed=5)
    store.append("a", rows)
    store.close()
    again = open_store()
    assert torch.equal(everything(again, "a"), rows)


def test_a_full_lower_tier_is_reported_by_flush_and_loses_nothing(
    layout: PageLayout, make_rows: MakeRows, tmp_path: Path
) -> None:
    nvme = NvmeTier(tmp_path / "rows", limit_bytes=5 * layout.page_bytes)
    store = RowStore(layout, [RamTier(2 * layout.page_bytes), nvme], backlog_pages=3)
    rows = make_rows(64)
    store.append("old", rows[:, :, :, :16])
    assert store.flush("old")
    store.append("a", rows[:, :, :, :40])
    assert not store.flush("a")
    store.append("a", rows[:, :, :, 40:])
    assert not store.flush("a")
    assert torch.equal(everything(store, "a"), rows)
    with pytest.raises(TierFullError):
        store.append("a", rows)
    assert store.length("a") == 64
    store.truncate("a", 16)
    assert store.flush("a")
    assert torch.equal(everything(store, "a"), rows[:, :, :, :16])
    store.check()
    store.close()


def test_a_tier_that_recovers_gets_every_row(
    layout: PageLayout, make_rows: MakeRows, held_tier: Any
) -> None:
    store = RowStore(layout, [RamTier(1 << 20), held_tier])
    rows = make_rows(30)
    held_tier.failing = True
    held_tier.release.set()
    store.append("a", rows)
    assert not store.flush("a")
    assert torch.equal(everything(store, "a"), rows)
    held_tier.failing = False
    assert store.flush("a")
    store.check()
    assert torch.equal(everything(store, "a"), rows)
    store.close()


def test_a_delete_that_failed_never_takes_the_page_that_came_after_it(
    layout: PageLayout, make_rows: MakeRows, held_tier: Any
) -> None:
    store = RowStore(layout, [held_tier])
    rows = make_rows(16)
    held_tier.release.set()
    store.append("a", rows)
    store.flush("a")
    held_tier.failing = True
    store.delete("a")
    held_tier.failing = False
    store.append("a", rows[:, :, :, :8])
    while store.counters()["held"].written_bytes < 3 * layout.page_bytes:
        sleep(0.001)
    store.flush("a")
    assert torch.equal(everything(store, "a"), rows[:, :, :, :8])
    store.check()
    store.close()


def test_an_older_version_left_in_a_failing_upper_tier_is_never_read(
    layout: PageLayout, make_rows: MakeRows, held_tier: Any
) -> None:
    store = RowStore(layout, [held_tier, RamTier(1 << 20)])
    rows = make_rows(8)
    held_tier.release.set()
    store.append("a", rows[:, :, :, :5])
    store.flush("a")
    held_tier.failing = True
    store.truncate("a", 2)
    store.append("a", rows[:, :, :, 2:])
    store.flush("a")
    assert [header.valid_tokens for header in held_tier.stored()] == [5]
    assert torch.equal(everything(store, "a"), rows)
    held_tier.failing = False
    store.close()


def test_a_session_that_nobody_opened_has_the_rows_before_a_gap(
    layout: PageLayout, make_rows: MakeRows
) -> None:
    tier = RamTier(1 << 20)
    rows = make_rows(40)
    tier.put(
        [
            (
                key := PageKey("a", i),
                encode_page(layout, key, i + 1, rows[:, :, :, 8 * i : 8 * i + 8]),
            )
            for i in (0, 1, 3, 4)
        ]
    )
    tier.put([(PageKey("b", 2), encode_page(layout, PageKey("b", 2), 9, rows[:, :, :, :8]))])
    store = RowStore(layout, [tier])
    assert store.sessions() == ["a", "b"]
    assert (store.length("a"), store.length("b")) == (16, 0)
    assert torch.equal(everything(store, "a"), rows[:, :, :, :16])
    store.check()
    store.close()


def test_threads_read_flush_and_drop_while_rows_are_appended(
    open_store: OpenStore, layout: PageLayout
) -> None:
    store = open_store(ram_pages=3, segment_bytes=20_000)
    failures = []
    done = []

    def numbered(first: int, tokens: int) -> Tensor:
        return (
            torch.arange(first, first + tokens)
            .float()
            .view(1, 1, 1, -1, 1)
            .expand(layout.rows_shape(tokens))
        )

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
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
        store.append("b", numbered(0, 21))
        store.flush("b")
        store.delete("b")

    store.append("a", numbered(0, 1))
    threads = [
        Thread(target=guarded(work))
        for work in (read, read, scan, come_and_go, lambda: store.flush("a"))
    ]
    for thread in threads:
        thread.start()
    for first in range(1, 800):
        store.append("a", numbered(first, 1))
    done.append(True)
    for thread in threads:
        thread.join()
    assert failures == []
    store.delete("b")
    assert torch.equal(everything(store, "a"), numbered(0, 800))
    store.check()


def test_ram_alone_never_drops_a_row(layout: PageLayout, make_rows: MakeRows) -> None:
    store = RowStore(layout, [RamTier(3 * layout.page_bytes)], backlog_pages=2)
    rows = make_rows(60)
    store.append("a", rows[:, :, :, :24])
    assert not store.flush("a"), "memory is not durable"
    store.append("a", rows[:, :, :, 24:40])
    assert not store.flush("a")
    with pytest.raises(TierFullError):
        store.append("a", rows[:, :, :, 40:])
    assert torch.equal(everything(store, "a"), rows[:, :, :, :40])
    store.truncate("a", 24)
    store.close()


def test_a_store_of_another_model_is_refused_whole(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout
) -> None:
    store = open_store()
    store.append("a", make_rows(9))
    store.close()
    with pytest.raises(ForeignPageError, match="another model"):
        open_store(layout=replace(layout, fingerprint="model B"))
    again = open_store()
    assert again.length("a") == 9


def test_a_corrupt_page_is_an_error_and_its_neighbours_are_read(
    open_store: OpenStore, make_rows: MakeRows, layout: PageLayout, tmp_path: Path
) -> None:
    store = open_store()
    rows = make_rows(40)
    store.append("a", rows)
    store.close()
    (segment,) = (tmp_path / "rows").glob("segment-*.kv")
    raw = bytearray(segment.read_bytes())
    raw[2 * layout.page_bytes + 300] ^= 1
    segment.write_bytes(raw)
    again = open_store()
    assert again.length("a") == 40
    assert torch.equal(again.gather("a", torch.tensor([15, 24])), rows[:, :, :, [15, 24]])
    with pytest.raises(CorruptPageError, match="page 2"):
        everything(again, "a")


def test_a_page_that_vanished_is_an_error(layout: PageLayout, make_rows: MakeRows) -> None:
    tier = RamTier(1 << 20)
    store = RowStore(layout, [tier])
    store.append("a", make_rows(20))
    store.flush("a")
    tier.delete([PageKey("a", 1)])
    with pytest.raises(MissingPageError):
        everything(store, "a")
    store.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.gather("a", torch.tensor([10])),
        lambda store: store.gather("a", torch.tensor([-1])),
        lambda store: store.gather("unknown", torch.tensor([0])),
        lambda store: store.gather_heads("a", 0, torch.tensor([[0], [-2]])),
        lambda store: store.truncate("a", 11),
        lambda store: store.truncate("a", -1),
        lambda store: list(store.scan_keys("a", 0, 11)),
    ],
)
def test_rows_the_session_does_not_have_are_refused(
    open_store: OpenStore, make_rows: MakeRows, ask: Callable[[RowStore], object]
) -> None:
    store = open_store()
    store.append("a", make_rows(10))
    with pytest.raises(RowRangeError):
        ask(store)
    assert store.sessions() == ["a"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda store, rows: store.append("a", rows.half()),
        lambda store, rows: store.append("a", rows[:2]),
        lambda store, rows: store.append("a", rows[0]),
        lambda store, rows: store.append("x" * 200, rows),
        lambda store, rows: store.gather("a", torch.tensor([0.0])),
        lambda store, rows: store.gather_heads("a", 3, torch.tensor([[0], [0]])),
        lambda store, rows: store.gather_heads("a", 0, torch.tensor([[0]])),
        lambda store, rows: store.gather_selection("a", [torch.tensor([[0], [0]])]),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    open_store: OpenStore, make_rows: MakeRows, ask: Callable[[RowStore, Tensor], object]
) -> None:
    store = open_store()
    rows = make_rows(5)
    store.append("a", rows)
    with pytest.raises(RowShapeError):
        ask(store, rows)
    assert (store.sessions(), store.length("a")) == (["a"], 5)


def test_a_closed_store_says_so(open_store: OpenStore, make_rows: MakeRows) -> None:
    store = open_store()
    store.close()
    with pytest.raises(StoreClosedError):
        store.append("a", make_rows(1))
