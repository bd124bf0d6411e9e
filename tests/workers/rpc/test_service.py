"""The service answers every call of the table."""

from collections.abc import AsyncGenerator
from pathlib import Path
from types import GenericAlias
from typing import Any, get_type_hints

import pytest

from kvrecall.domain.page_ids import split_ids
from kvrecall.protocol import PROTOCOL_VERSION
from kvrecall.protocol.calls import CALLS, Call
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.model.embedder import Embedder
from workers.rpc import service as service_module
from workers.rpc.catalog_binding import CatalogBinding
from workers.rpc.service import WorkerService


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_method_has_the_messages_of_its_call(call: Call[Any, Any]) -> None:
    hints = get_type_hints(getattr(WorkerService, call.method))
    response: Any = call.response
    answer = GenericAlias(AsyncGenerator, (response, None)) if call.streaming else response
    assert hints == {"request": call.request, "return": answer}


async def test_pages_are_listed_in_bounded_parts(
    make_worker: Any, tmp_path: Path, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_PAGES_LISTED", 3)
    worker = make_worker(directory="rows")
    worker.open("s")
    pages = split_ids(worker.turn("s", words(80)).state.page_ids)
    service = WorkerService(
        worker.scheduler, Embedder(), "tiny", CatalogBinding(tmp_path / "catalog-id")
    )
    parts = [split_ids(part.page_ids) async for part in service.list_pages(pb.ListPagesRequest())]
    assert [len(part) for part in parts[:-1]] == [3] * ((len(pages) - 1) // 3)
    assert sorted(page for part in parts for page in part) == sorted(pages)


async def test_info_and_record_state_the_protocols_version(
    make_worker: Any, tmp_path: Path
) -> None:
    worker = make_worker()
    service = WorkerService(
        worker.scheduler, Embedder(), "tiny", CatalogBinding(tmp_path / "catalog-id")
    )
    assert (await service.describe(CALLS[0].request())).protocol_version == PROTOCOL_VERSION
    assert service.record("a", "a:1", draining=False).protocol_version == PROTOCOL_VERSION
