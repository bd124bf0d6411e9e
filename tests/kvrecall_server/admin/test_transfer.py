"""Sessions exported from one data directory and imported into another."""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.messages import Message, Sampling, ToolCall
from kvrecall.domain.page_ids import is_random, split_ids
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.tool_calls import CallStatus
from kvrecall.domain.tool_events import ToolEvent, ToolEventType
from kvrecall.domain.turn_request import TurnRequest
from kvrecall_server.admin.archive.format import read_records, write_archive
from kvrecall_server.admin.archive.pages import get_origin
from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.admin.archive.records import dump_session
from kvrecall_server.app.catalog import open_catalog
from kvstore.format.codec import Codec
from kvstore.format.page import PageLayout, parse_header
from kvstore.tiers.nvme.tier import NvmeTier
from services.catalog.records import SessionDump
from services.service import SessionService

Command = Callable[..., Any]
QUESTIONS = ("What is the number of the locker of Tarvik?", "And the extension of Melnor?")


@pytest.fixture
def export(command: Command, served: Any, tmp_path: Path) -> Callable[..., Path]:
    """export(session): the file of a session of the served directory."""

    def run(session: str, *options: str) -> Path:
        found = command(
            "export", session, tmp_path / "session.kvs", "--data", served.data, *options
        )
        assert found.exit_code == 0, found.output
        return tmp_path / "session.kvs"

    return run


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another data directory."""
    return tmp_path / "elsewhere"


def read_dump(data: Path, session: str, settings_of: Any) -> SessionDump:
    """Read all that a directory's catalog stores of a session."""

    async def read() -> SessionDump:
        catalog = await open_catalog(settings_of(data))
        try:
            return await dump_session(catalog, session)
        finally:
            await catalog.close()

    return asyncio.run(read())


def answers(data: Path, session: str, running: Any, say: Any) -> list[str]:
    """Return the next answers of a session, each after the ones before."""

    async def ask() -> list[str]:
        async with running(data) as service:
            return [await say(service, session, question) for question in QUESTIONS]

    return asyncio.run(ask())


@pytest.mark.parametrize("which", ["parent", "child", "orphan"])
def test_an_imported_session_continues_as_the_original_would(
    which: str, command: Command, served: Any, export: Any, elsewhere: Path, running: Any, say: Any
) -> None:
    session = getattr(served, which)
    found = command("import", export(session), "--data", elsewhere)
    assert found.exit_code == 0, found.output
    assert "missing" not in found.output
    assert command("fsck", "--data", elsewhere).exit_code == 0
    assert answers(elsewhere, session, running, say) == answers(served.data, session, running, say)


def test_without_pages_the_rows_are_computed_again(
    command: Command, served: Any, export: Any, elsewhere: Path, running: Any, say: Any
) -> None:
    found = command("import", export(served.child, "--without-pages"), "--data", elsewhere)
    assert found.exit_code == 0, found.output
    assert "are computed again" in found.output
    assert answers(elsewhere, served.child, running, say) == answers(
        served.data, served.child, running, say
    )
    assert command("fsck", "--data", elsewhere).exit_code == 0


def test_all_stored_state_is_transferred(
    command: Command, served: Any, export: Any, elsewhere: Path, settings_of: Any
) -> None:
    command("import", export(served.parent), "--data", elsewhere)
    before, after = (
        read_dump(data, served.parent, settings_of) for data in (served.data, elsewhere)
    )
    moved = replace(after.session, epoch=before.session.epoch, worker=before.session.worker)
    # The pages have ids that no other session has.
    assert len(after.page_ids) == len(before.page_ids)
    assert all(is_random(page_id) for page_id in split_ids(after.page_ids))
    assert replace(after, session=moved, page_ids=before.page_ids) == before
    assert after.session.epoch > before.session.epoch
    assert len(after.turns) == 4
    assert after.session.settings.cache_salt == "ann"


def test_a_pause_is_transferred_with_partial_tool_output(
    command: Command,
    elsewhere: Path,
    tmp_path: Path,
    running: Any,
    say: Any,
    settings_of: Any,
    ask: Any,
) -> None:
    data = tmp_path / "pausing"

    async def pause(service: SessionService) -> str:
        session = (
            await service.create(
                CreateSession(budget=128, repair_rows=32, method="epicache", seed=3)
            )
        ).id
        for _ in range(3):
            await say(
                service,
                session,
                *["The train to Aldova leaves from platform seven."] * 6,
                generate=False,
            )
        calls = Message(
            "assistant", tool_calls=(ToolCall("c1", "lookup", "{}"), ToolCall("c2", "lookup", "{}"))
        )
        await ask(
            service,
            session,
            TurnRequest((Message("user", "Look it up, please."), calls), generate=False),
        )
        await service.event(session, ToolEvent(ToolEventType.COMPLETED, "c1", "platform seven"))
        return session

    async def paused() -> str:
        async with running(data) as service:
            return await pause(service)

    session = asyncio.run(paused())
    file = tmp_path / "paused.kvs"
    assert command("export", session, file, "--data", data).exit_code == 0
    assert command("import", file, "--data", elsewhere).exit_code == 0
    before, after = (read_dump(each, session, settings_of) for each in (data, elsewhere))
    assert after.calls == before.calls
    assert [call.status for call in after.calls] == [CallStatus.COMPLETED, CallStatus.PENDING]
    assert after.session.calls == before.session.calls
    assert (after.episodes, after.segments, after.built) == (
        before.episodes,
        before.segments,
        before.built,
    )
    assert after.repairs == before.repairs

    async def go_on(where: Path) -> str:
        async with running(where) as service:
            await service.event(session, ToolEvent(ToolEventType.COMPLETED, "c2", "locker 5093"))
            request = TurnRequest((), sampling=Sampling(max_tokens=12), wait_for_repairs=True)
            return str(await ask(service, session, request))

    assert asyncio.run(go_on(elsewhere)) == asyncio.run(go_on(data))


def test_int8_pages_are_transferred_unchanged(
    command: Command, tmp_path: Path, elsewhere: Path, running: Any, say: Any
) -> None:
    data = tmp_path / "int8"
    codecs = {"ram_codec": "int8", "nvme_codec": "int8"}

    async def serve() -> str:
        async with running(data, store=codecs) as service:
            session = (await service.create(CreateSession(budget=96, method="snapkv", seed=3))).id
            for _ in range(2):
                await say(
                    service,
                    session,
                    *["Please note that the locker of Tarvik has the number 5093."] * 8,
                )
            return str(session)

    session = asyncio.run(serve())
    assert command("export", session, tmp_path / "s.kvs", "--data", data).exit_code == 0
    codes = {
        parse_header(record.data).codec
        for record in read_records(tmp_path / "s.kvs")
        if record.kind is RecordKind.PAGE
    }
    assert codes == {Codec.INT8}
    assert command("import", tmp_path / "s.kvs", "--data", elsewhere).exit_code == 0
    assert answers(elsewhere, session, running, say) == answers(data, session, running, say)


def test_an_id_that_is_taken_needs_another(
    command: Command, served: Any, export: Any, running: Any, say: Any
) -> None:
    file = export(served.parent)
    refused = command("import", file, "--data", served.data)
    assert (refused.exit_code, "--as" in refused.output) == (2, True)
    assert command("import", file, "--data", served.data, "--as", "s_twin").exit_code == 0
    assert command("fsck", "--data", served.data).exit_code == 0
    assert answers(served.data, "s_twin", running, say) == answers(
        served.data, served.parent, running, say
    )


def test_a_damaged_file_changes_nothing(
    command: Command, served: Any, export: Any, elsewhere: Path
) -> None:
    file = export(served.parent)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    refused = command("import", file, "--data", elsewhere)
    assert (refused.exit_code, "damaged" in refused.output or "checksum" in refused.output) == (
        2,
        True,
    )
    file.write_bytes(raw[: len(raw) // 2])
    refused = command("import", file, "--data", elsewhere)
    assert (refused.exit_code, "truncated" in refused.output) == (2, True)
    assert not elsewhere.exists()


def rewrite(file: Path, change: Callable[[Record], Record]) -> None:
    """Rewrite a file with changed records and a matching checksum."""
    some = [change(record) for record in read_records(file)]
    with write_archive(file) as writer:
        for record in some:
            writer.add(record)


@pytest.mark.parametrize(
    ("number", "sentence"), [(1, "stands behind page 1"), (900, "has page 900")]
)
def test_pages_in_another_order_and_pages_that_the_session_does_not_have_are_refused(
    number: int, sentence: str, command: Command, served: Any, export: Any, elsewhere: Path
) -> None:
    def renumber(record: Record) -> Record:
        is_third = record.kind is RecordKind.PAGE and record.value == 2
        return replace(record, value=number) if is_third else record

    def cut(record: Record) -> bool:
        return record.kind is not RecordKind.PAGE or record.value <= 2

    file = export(served.parent)
    some = [renumber(record) for record in read_records(file) if cut(record)]
    with write_archive(file) as writer:
        for record in some:
            writer.add(record)
    refused = command("import", file, "--data", elsewhere)
    assert (refused.exit_code, sentence in " ".join(refused.output.split())) == (2, True)
    if elsewhere.exists():
        with closing(NvmeTier(elsewhere / "pages")) as files:
            assert not list(files.stored())


def test_another_models_session_is_refused(
    command: Command, served: Any, export: Any, elsewhere: Path
) -> None:
    def of_another(record: Record) -> Record:
        if record.kind is not RecordKind.HEADER:
            return record
        origin = {**record.value["origin"], "fingerprint": "00"}
        return replace(record, value={**record.value, "model": "other", "origin": origin})

    file = export(served.parent)
    rewrite(file, of_another)
    refused = command("import", file, "--data", elsewhere)
    assert (refused.exit_code, "another model (other)" in refused.output) == (2, True)
    assert not elsewhere.exists()


def test_rows_of_another_type_are_refused(
    command: Command, served: Any, export: Any, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export(served.parent)
    monkeypatch.setenv("KVRECALL_DTYPE", "bfloat16")
    refused = command("import", file, "--data", elsewhere)
    assert (refused.exit_code, "another shape or type" in refused.output) == (2, True)
    assert not elsewhere.exists()


def test_values_of_another_form_are_refused(
    command: Command, served: Any, export: Any, elsewhere: Path
) -> None:
    file = export(served.parent)
    rewrite(
        file, lambda record: replace(record, value=[]) if record.kind is RecordKind.TURN else record
    )
    refused = command("import", file, "--data", elsewhere)
    assert (refused.exit_code, "does not know" in refused.output) == (2, True)
    assert not elsewhere.exists()


def test_a_disk_that_is_full_leaves_no_page_and_no_session(
    command: Command,
    served: Any,
    export: Any,
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings_of: Any,
) -> None:
    file = export(served.parent)
    monkeypatch.setenv("KVRECALL_STORE__NVME_BYTES", str(1 << 20))
    refused = command("import", file, "--data", elsewhere)
    assert (refused.exit_code, "do not fit" in refused.output) == (2, True)
    with closing(NvmeTier(elsewhere / "pages")) as files:
        assert not list(files.stored())
    with pytest.raises(UnknownSession):
        read_dump(elsewhere, served.parent, settings_of)


def test_missing_pages_are_reported_and_computed_again(
    command: Command, served: Any, tmp_path: Path, elsewhere: Path, running: Any, say: Any
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(served.data, whole)
    for path in (served.data / "pages").glob("segment-*.kv"):
        path.unlink()
    found = command("export", served.parent, tmp_path / "s.kvs", "--data", served.data)
    assert "0 pages" in found.output
    assert "are missing" in found.output
    command("import", tmp_path / "s.kvs", "--data", elsewhere)
    assert answers(elsewhere, served.parent, running, say) == answers(
        whole, served.parent, running, say
    )


def test_an_unknown_session_and_a_directory_in_use_are_refused(
    command: Command, served: Any, tmp_path: Path
) -> None:
    unknown = command("export", "s_nobody", tmp_path / "s.kvs", "--data", served.data)
    assert (unknown.exit_code, "no session" in unknown.output) == (2, True)
    nowhere = command("export", "s_nobody", tmp_path / "s.kvs", "--data", tmp_path / "nowhere")
    assert (nowhere.exit_code, (tmp_path / "nowhere").exists()) == (2, False)
    with closing(NvmeTier(served.data / "pages")):
        in_use = command("export", served.parent, tmp_path / "s.kvs", "--data", served.data)
    assert (in_use.exit_code, "is used by another process" in in_use.output) == (2, True)
    assert not list(tmp_path.glob("*.kvs"))


def test_an_origin_differs_with_everything_that_shapes_rows() -> None:
    layout = PageLayout(2, 1, 8, torch.float32, "a model")
    changes: list[dict[str, Any]] = [
        {"n_layers": 3},
        {"dtype": torch.bfloat16},
        {"fingerprint": "another"},
    ]
    assert (
        len(
            {
                get_origin(each)
                for each in (layout, *(replace(layout, **change) for change in changes))
            }
        )
        == 4
    )
