"""Write and gather bandwidth of every tier as a share of its limit, measured in the same run.

`python -m benchmarks tiers` takes pages in the shape of the reference model and of a large one. The
limits: a copy of the same bytes in memory; the same bytes in raw files, read from the page cache
and, if the kernel drops them from it, from the disk; SET and GET of the same values over a plain
socket, pipelined in the same batches. Limit and tier alternate, and a ratio is the median of those
of each turn, so that disturbances of the machine affect both. A gather copies rows from the tier
into memory of the caller. The result file goes to `benchmarks/results/`.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from redis import Redis

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from benchmarks.tiers.subjects import (
    Files,
    Memory,
    Pages,
    RedisSocket,
    StoreSubject,
    Subject,
    TierSubject,
    bytes_from_disk,
    drop_page_cache,
    empty_folder,
    redis_server,
)
from kvrecall_server.reporting.results import Row, speed_row
from kvstore.format.encryption import KEY_BYTES
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier

SHAPES = {
    "reference": PageLayout(5, 2, 64, torch.float32, "benchmark"),
    "large": PageLayout(28, 8, 128, torch.bfloat16, "benchmark"),
}
_STORE = "row store"
_ENCRYPTED = "row store, encrypted"


Compare = Callable[[str, Subject, Sequence[Subject]], Iterator[Row]]


def ram(pages: Pages, folder: Path, compare: Compare) -> Iterator[Row]:
    """Compare a copy in memory with the RAM tier and row stores over it."""

    def tier() -> RamTier:
        return RamTier(pages.bytes + 4 * pages.layout.page_bytes)

    alone = TierSubject(pages, tier)
    store = StoreSubject(_STORE, pages, lambda: RowStore(pages.layout, [tier()]))
    limit = Memory(pages).subject()
    yield from compare("write", limit, [alone.write(), store.write()])
    yield from compare("gather", limit, [alone.read(), store.read()])
    close_all([alone, store])


def nvme(pages: Pages, folder: Path, compare: Compare) -> Iterator[Row]:
    """Compare raw files with the NVMe tier and row stores over it and a smaller RAM tier."""

    def tier(path: Path) -> NvmeTier:
        empty_folder(path)
        return NvmeTier(path)

    def open_store(name: str) -> RowStore:
        tiers: list[Tier] = [RamTier(pages.bytes // 4), tier(folder / name)]
        return RowStore(pages.layout, tiers)

    files = Files(pages, folder)
    alone = TierSubject(pages, partial(tier, folder / "tier"), fresh=True)
    stores = [
        StoreSubject(name, pages, partial(open_store, name), fresh=True, key=key)
        for name, key in ((_STORE, b""), (_ENCRYPTED, bytes(KEY_BYTES)))
    ]
    writes = [alone.write(), *(store.write() for store in stores)]
    yield from compare("write", files.write(), writes)
    reads = [files.read_verified(), alone.read(), *(store.read() for store in stores)]
    yield from compare("gather", files.read(), reads)
    files.drop_page_cache()
    if bytes_from_disk(files.read().run) > 0.9 * pages.bytes:
        subjects = [
            files.read_verified(files.drop_page_cache),
            alone.read(partial(drop_page_cache, folder / "tier")),
            *(
                store.read(partial(drop_page_cache, folder / name))
                for store, name in zip(stores, (_STORE, _ENCRYPTED), strict=True)
            ),
        ]
        yield from compare("gather from the disk", files.read(files.drop_page_cache), subjects)
    close_all([alone, *stores])


def redis(pages: Pages, folder: Path, compare: Compare) -> Iterator[Row]:
    """Compare a plain socket with the Redis tier and a row store over it."""
    with redis_server(folder) as port:

        def tier(namespace: str) -> RedisTier:
            return RedisTier(f"redis://127.0.0.1:{port}", pages.layout, namespace=namespace)

        def open_store() -> RowStore:
            return RowStore(pages.layout, [tier("store")])

        def clear(namespace: str) -> None:  # pages that were deleted live on for minutes
            with closing(Redis(port=port)) as server:
                for name in server.scan_iter(f"{namespace}:*", count=1000):
                    server.delete(name)

        limit = RedisSocket(pages, port)
        alone = TierSubject(pages, partial(tier, "tier"), clear=partial(clear, "tier"))
        store = StoreSubject(_STORE, pages, open_store, clear=partial(clear, "store"))
        yield from compare("write", limit.write(), [alone.write(), store.write()])
        yield from compare("gather", limit.read(), [alone.read(), store.read()])
        close_all([limit, alone, store])


def close_all(subjects: Sequence[TierSubject | StoreSubject | RedisSocket]) -> None:
    """Close all subjects."""
    for subject in subjects:
        subject.close()


TIERS = {"ram": ram, "nvme": nvme, "redis": redis}


def compare_subjects(
    condition: str,
    pages: Pages,
    repeats: int,
    metric: str,
    limit: Subject,
    subjects: Sequence[Subject],
) -> Iterator[Row]:
    """Bytes per second of the limit and of other subjects, in turns, without the first turn."""
    seconds: dict[str, list[float]] = {subject.name: [] for subject in (limit, *subjects)}
    for turn in range(repeats + 1):
        for subject in (limit, *subjects):
            subject.before()
            began = perf_counter()
            subject.run()
            spent = perf_counter() - began
            if turn:
                seconds[subject.name].append(spent)
    for name, found in seconds.items():
        ratios = [best / each for best, each in zip(seconds[limit.name], found, strict=True)]
        ratio = (
            {"ratio_to": limit.name, "ratio": round(median(ratios), 3)}
            if name != limit.name
            else {}
        )
        page = {"microseconds_per_page": round(1e6 * median(found) / pages.count, 1)}
        yield speed_row(
            f"{condition}: {name}",
            metric,
            "bytes per second",
            [pages.bytes / each for each in found],
            **page,
            **ratio,
        )


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement."""

    seed: int = 0
    shapes: tuple[str, ...] = option(tuple(SHAPES), "of pages", choices=tuple(SHAPES))
    tiers: tuple[str, ...] = option(tuple(TIERS), choices=tuple(TIERS))
    megabytes: int = option(64, "of pages, for each measurement")
    repeats: int = 15
    threads: int = option(1, "of torch, for limit and tier alike")


def measure(plan: Plan) -> Measured:
    """Measure tiers in the shapes of the plan."""
    model = "; ".join(
        f"{name}: pages of {layout.page_bytes} bytes" for name, layout in SHAPES.items()
    )
    return Measured("tiers.json", model, tier_rows(plan), plan.seed)


def tier_rows(plan: Plan) -> Iterator[Row]:
    """Rows of each tier in each shape."""
    torch.set_num_threads(plan.threads)
    for shape in plan.shapes:
        pages = Pages(SHAPES[shape], plan.megabytes << 20, plan.seed)
        for tier in plan.tiers:
            compare = partial(compare_subjects, f"{shape}, {tier}", pages, plan.repeats)
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                yield from TIERS[tier](pages, Path(folder), compare)


BENCHMARK = Benchmark("tiers", "bandwidth of each tier as a share of its limit", Plan, measure)
