"""Disks that are full, slow, hanging or failing, and data that is damaged or lost."""

import errno
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import redis

from faults.kinds.base import NothingToHitError, Undo
from faults.kinds.flips import flip_in_files, flip_in_redis
from faults.rig.drive import Drive
from faults.rig.setups import Setup

CATALOG = "catalog.sqlite3"
PAGES = "pages/"


def fill_disk(setup: Setup, rng: Random) -> Undo:
    """A full disk, with room for a few bytes or none."""
    ids = setup.ids
    setup.disk.fill(rng.choice((0, 4096, rng.randrange(1 << 20))), ids)
    return lambda: setup.disk.free(ids)


def kill_on_full_disk(setup: Setup, rng: Random) -> None:
    """A full disk; a while later a worker is killed, and there is room again."""
    undo = fill_disk(setup, rng)
    time.sleep(rng.uniform(0.2, 2))
    server = rng.choice(setup.workers)
    server.kill_one(rng)
    undo()
    server.start()


def flip_in_payload(setup: Setup, rng: Random) -> None:
    """A flipped bit in a page of a file, under a running process."""
    if flip_in_files(rng.choice(setup.pages), "payload", rng) is None:
        raise NothingToHitError


def flip_in_header(setup: Setup, rng: Random) -> None:
    """A flipped bit in a record header of a segment file, under a running process."""
    if flip_in_files(rng.choice(setup.pages), "header", rng) is None:
        raise NothingToHitError


def flip_while_down(setup: Setup, rng: Random) -> None:
    """A killed worker whose files have flipped bits when it restarts."""
    server = rng.choice(setup.workers)
    server.kill_one(rng)
    folders = setup.get_pages(server)
    hit = [
        flip_in_files(_choose(folders, rng), rng.choice(("header", "payload")), rng)
        for _ in range(rng.randrange(1, 4))
    ]
    server.start()
    if not any(hit):
        raise NothingToHitError


def lose_files(setup: Setup, rng: Random) -> None:
    """A killed worker whose segment files, or those of a rank, are all deleted when it restarts."""
    server = rng.choice(setup.workers)
    server.kill_one(rng)
    folders = setup.get_pages(server)
    lost = folders if len(folders) == 1 or rng.random() < 0.5 else [rng.choice(folders)]
    for folder in lost:
        for segment in folder.glob("segment-*.kv"):
            segment.unlink()
    server.start()


def flip_in_redis_page(setup: Setup, rng: Random) -> None:
    """A flipped bit in a page in Redis."""
    assert setup.redis is not None, "a cluster has one"
    try:
        with setup.redis.client() as client:
            flipped = flip_in_redis(client, rng)
    except redis.ConnectionError as error:  # still down because of an earlier fault
        raise NothingToHitError from error
    if flipped is None:
        raise NothingToHitError


def sync_slowly(setup: Setup, rng: Random) -> Undo:
    """Syncs of a drive that take a tenth of a second to two seconds."""
    drive = _drive(setup, rng)
    drive.disturb("slow", milliseconds=rng.randrange(100, 2000))
    return drive.disturb


def hang_sync(setup: Setup, rng: Random) -> Undo:
    """Syncs of a drive that do not return for a while."""
    drive = _drive(setup, rng)
    drive.disturb("hangs")
    return drive.disturb


def fail_sync_of_pages(setup: Setup, rng: Random) -> None:
    """EIO at a sync of page files; a tier that failed once is not trusted until a restart."""
    server = rng.choice(setup.workers)
    if server.drive is None:
        raise NothingToHitError
    server.drive.disturb("fails", part=PAGES)
    time.sleep(rng.uniform(0.5, 3.0))
    server.drive.disturb()
    server.kill_one(rng)
    server.start()


def fail_sync_of_catalog(setup: Setup, rng: Random) -> Undo:
    """EIO at syncs of the catalog's file: no turn may be acknowledged meanwhile."""
    drive = _catalog_drive(setup)
    drive.disturb("fails", part=CATALOG)
    return drive.disturb


def fail_writes_of_catalog(setup: Setup, rng: Random) -> Undo:
    """EIO or ENOSPC at writes of the catalog's file."""
    drive = _catalog_drive(setup)
    drive.disturb(write_errno=rng.choice((errno.EIO, errno.ENOSPC)), part=CATALOG)
    return drive.disturb


def _choose(folders: Sequence[Path], rng: Random) -> Path:
    """Choose a rank's folder."""
    return folders[0] if len(folders) == 1 else rng.choice(folders)


def _drive(setup: Setup, rng: Random) -> Drive:
    drives = [server.drive for server in setup.servers if server.drive is not None]
    if not drives:
        raise NothingToHitError
    return rng.choice(drives)


def _catalog_drive(setup: Setup) -> Drive:
    """Drive of the process with a SQLite catalog."""
    drive = setup.gateways[0].drive
    if drive is None or setup.catalog.catalog_url is not None:
        raise NothingToHitError
    return drive
