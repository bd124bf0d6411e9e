"""Pages of which a crash between two writes has left another part on each rank."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrecall.domain.page_ids import PageId, join_ids, make_random_id
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.errors import DirectoryLockedError
from kvstore.format.page import HEADER_BYTES, seal
from kvstore.fsck import locked_directory
from kvstore.tiers.nvme.tier import NvmeTier

WAIT = 600


def test_pages_of_one_rank_alone_are_listed_deleted_and_counted(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    tmp_path: Path,
    until: Callable[..., None],
) -> None:
    worker = make_worker(directory="rows")
    worker.open("s")
    worker.turn("s", words(60))
    list_all = pb.ListPagesRequest()
    common: set[PageId] = worker.scheduler.list_pages(list_all).result(WAIT)
    worker.close()
    until(lambda: _is_free(tmp_path / "rows" / "rank-1"), "the other rank has closed its store")
    alone = [_add_page(tmp_path / "rows" / f"rank-{rank}") for rank in range(2)]
    worker = make_worker(directory="rows")
    assert worker.scheduler.list_pages(list_all).result(WAIT) == {*common, *alone}
    young = pb.ListPagesRequest(older_than_seconds=3600)
    assert worker.scheduler.list_pages(young).result(WAIT) == set()
    unknown = make_random_id()
    request = pb.DeletePagesRequest(page_ids=join_ids([*alone, unknown, *sorted(common)[:1]]))
    assert [worker.scheduler.delete_pages(request).result(WAIT) for _ in range(2)] == [3, 0]
    assert worker.scheduler.list_pages(list_all).result(WAIT) == set(sorted(common)[1:])


def _is_free(folder: Path) -> bool:
    try:
        with locked_directory(folder):
            return True
    except DirectoryLockedError:
        return False


def _add_page(folder: Path) -> PageId:
    """Add a page, of the rows of another one, to the files of a rank."""
    new = make_random_id()
    with closing(NvmeTier(folder)) as tier:
        header = next(tier.stored())
        (blob,) = tier.get([header.id])
        assert blob is not None
        tier.put([(new, seal(replace(header, id=new), bytes(blob)[HEADER_BYTES:]))])
        tier.flush()
    return new
