"""Costs of the row store by the number of stored sessions, with pages of few bytes."""

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch

from benchmarks.scale.memory import traced
from kvrecall.domain.page_ids import make_random_id
from kvrecall_server.reporting.results import Row, speed_row
from kvstore.format.codec import encode_page
from kvstore.format.page import (
    HEADER_BYTES,
    ID_BYTES,
    PageId,
    PageLayout,
    parse_header,
    seal,
)
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier

_LAYOUT = PageLayout(1, 1, 8, torch.float32, "scale", page_tokens=8)
# Little, so that it is full before the memory of idle sessions is measured.
_RAM_BYTES = 1 << 20
# Rows of a filled session: three pages.
_STORED = 24
_TURN_ROWS = 16
# Sessions between two flushes while the store is filled: a flush syncs all that is queued.
_FLUSH_EVERY = 500
# Pages of a session of the store whose start is measured.
_SESSION_PAGES = 300
# Sessions over which the memory of one is averaged, per repetition.
_IDLE_SESSIONS = 20


@dataclass
class StoredRows:
    """A row store over files, and over a Redis if `url` names one."""

    folder: Path
    url: str | None
    seed: int
    repetitions: int
    sessions: int = 0
    created: dict[str, list[PageId]] = field(default_factory=dict)
    rng: random.Random = field(init=False)
    store: RowStore = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.store = self._open()

    @property
    def name(self) -> str:
        """The tiers that are measured."""
        return "rows in files" if self.url is None else "rows in files and Redis"

    def fill(self, sessions: int) -> None:
        """Add sessions of `_STORED` rows until there are `sessions`."""
        rows = torch.randn(_LAYOUT.rows_shape(_STORED))
        for number in range(self.sessions, sessions):
            session = _name(number)
            self.store.append(session, rows, _make_ids(number, _STORED // _LAYOUT.page_tokens))
            if number % _FLUSH_EVERY == 0:
                self.store.flush(session)
        self.sessions = sessions
        self.restart()

    def measure(self) -> list[Row]:
        """Measure every operation with the sessions that there are now."""
        rows = [
            self._row("usage", self._repeat(self.store.usage)),
            self._row("first turn of a new session", self._repeat(self._create)),
            self._row("turn of an open session", self._time_turns()),
            self._row("turn of a stored session", self._time_stored_turns()),
            self._row("fork", self._time_forks()),
            self._row("delete", self._time_deletions()),
            self._row("start", [self.restart()]),
        ]
        metric = "memory beside pages and summaries"
        rows.append(self._row("idle session", [self._measure_memory()], metric, "bytes"))
        for session in self.created:
            self.store.close_session(session)
        ids = {page_id for pages in self.created.values() for page_id in pages}
        self.store.delete(list(ids)).result()
        self.created.clear()
        return rows

    def close(self) -> None:
        """Close the store and delete its files."""
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> RowStore:
        tiers: list[Tier] = [RamTier(_RAM_BYTES), NvmeTier(_get_files(self.folder))]
        if self.url is not None:
            tiers.append(RedisTier(self.url, _LAYOUT, namespace="scale", ttl_seconds=86400))
        return RowStore(_LAYOUT, tiers)

    def restart(self) -> float:
        """Close the store and open it again; return the seconds of the opening."""
        self.store.close()
        started = time.perf_counter()
        self.store = self._open()
        return time.perf_counter() - started

    def _row(
        self,
        operation: str,
        values: Sequence[float],
        metric: str = "duration",
        unit: str = "seconds",
    ) -> Row:
        return speed_row(f"{self.name}: {operation}", metric, unit, values, sessions=self.sessions)

    def _repeat(self, operation: Callable[[], object]) -> list[float]:
        return [_time(operation) for _ in range(self.repetitions)]

    def _new_name(self) -> str:
        return f"n_{self.rng.getrandbits(96):024x}"

    def _create(self) -> str:
        session = self._new_name()
        self.created[session] = self._turn(session)
        return session

    def _turn(self, session: str) -> list[PageId]:
        """Append rows; returns the ids of their pages."""
        ids = [make_random_id() for _ in range(_TURN_ROWS // _LAYOUT.page_tokens)]
        self.store.append(session, torch.ones(_LAYOUT.rows_shape(_TURN_ROWS)), ids)
        if not self.store.flush(session):
            raise RuntimeError(f"the rows of {session} are not durable: see the tiers' errors")
        return ids

    def _time_turns(self) -> list[float]:
        session = self._create()
        return self._repeat(lambda: self.created[session].extend(self._turn(session)))

    def _time_stored_turns(self) -> list[float]:
        durations = []
        for _ in range(self.repetitions):
            number = self.rng.randrange(self.sessions)
            added = list[PageId]()
            durations.append(_time(lambda: added.extend(self._open_stored(number))))  # noqa: B023
            self.store.truncate(_name(number), _STORED)
            self.store.delete(added).result()
        return durations

    def _open_stored(self, number: int) -> list[PageId]:
        self.store.open(_name(number), _make_ids(number, _STORED // _LAYOUT.page_tokens))
        return self._turn(_name(number))

    def _time_forks(self) -> list[float]:
        parents = [self._create() for _ in range(self.repetitions)]
        return [_time(partial(self._fork, parent)) for parent in parents]

    def _fork(self, parent: str) -> None:
        child = self._new_name()
        self.store.open(child, self.created[parent])
        self.created[child] = self.created[parent]

    def _time_deletions(self) -> list[float]:
        created = [self._create() for _ in range(self.repetitions)]
        return [_time(partial(self._delete, session)) for session in created]

    def _delete(self, session: str) -> None:
        self.store.close_session(session)
        self.store.delete(self.created.pop(session)).result()

    def _measure_memory(self) -> float:
        """Return the bytes of Python objects that a session leaves when it is idle.

        A worker unloads it then. Pages in memory, which are full before, and tensors of summaries
        have limits of their own.
        """
        idle = _IDLE_SESSIONS * self.repetitions
        with traced() as traced_bytes:
            self._add_idle(_RAM_BYTES // _LAYOUT.page_bytes)
            before = traced_bytes()
            self._add_idle(idle)
            return (traced_bytes() - before) / idle

    def _add_idle(self, count: int) -> None:
        for _ in range(count):
            self.store.close_session(self._create())
        self.store.check()  # no write is under way, whose memory is not an idle session's


def measure_start(folder: Path, pages: int) -> Row:
    """Measure the start of a store over files that hold `pages` pages, 300 of each session.

    Raises ValueError if that is no whole number of sessions, RuntimeError if pages were not stored.
    """
    sessions, rest = divmod(pages, _SESSION_PAGES)
    if rest or not sessions:
        raise ValueError(f"{pages} pages are no multiple of {_SESSION_PAGES}")
    _fill_files(folder, sessions)
    stored = StoredRows(folder, None, 0, 1)
    started = stored.restart()
    in_files = stored.store.usage()["nvme"] / _LAYOUT.page_bytes
    stored.close()
    if in_files != pages:
        raise RuntimeError(f"{in_files:.0f} of {pages} pages are in the files")
    condition = f"start: rows in files, {pages} pages"
    return speed_row(condition, "duration", "seconds", [started], sessions=sessions)


def _fill_files(folder: Path, sessions: int) -> None:
    """Write pages of equal rows into the files, as the store would: it takes longer by itself."""
    rows = torch.ones(_LAYOUT.rows_shape(_LAYOUT.page_tokens))
    record = encode_page(_LAYOUT, bytes(ID_BYTES), rows, written_at=int(time.time()))
    header, payload = parse_header(record), bytes(memoryview(record)[HEADER_BYTES:])
    tier = NvmeTier(_get_files(folder))
    for number in range(sessions):
        ids = _make_ids(number, _SESSION_PAGES)
        tier.put([(page_id, seal(replace(header, id=page_id), payload)) for page_id in ids])
    tier.close()


def _make_ids(number: int, count: int) -> list[PageId]:
    """Make the ids of the pages of a filled session."""
    return [
        blake2b(f"{number}/{index}".encode(), digest_size=ID_BYTES).digest()
        for index in range(count)
    ]


def _get_files(folder: Path) -> Path:
    return folder / "pages"


def _name(number: int) -> str:
    return f"s_{number:024x}"


def _time(operation: Callable[[], object]) -> float:
    started = time.perf_counter()
    operation()
    return time.perf_counter() - started
