"""Sessions whose values do not add up are refused by import and found by fsck, with a sentence."""

import asyncio
import copy
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.admin.archive.format import read_records, write_archive
from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.admin.archive.records import dump_session, from_records, to_records
from kvrecall_server.admin.validation.bounds import Bounds
from kvrecall_server.admin.validation.session import validate_session
from kvrecall_server.app.errors import BadSessionFile
from services.catalog.records import SessionDump
from services.catalog.sqlite.catalog import SqliteCatalog

Command = Callable[..., Any]
Change = Callable[[Record], Record]
# Of the packaged model.
BOUNDS = Bounds(n_layers=5)
# The last record's head, its value and the checksum.
_END_BYTES = 13 + len(b"null") + 32


@pytest.fixture
def exported(command: Command, served: Any, tmp_path: Path) -> Path:
    """The file of a session."""
    file = tmp_path / "session.kvs"
    assert command("export", served.parent, file, "--data", served.data).exit_code == 0
    return file


@pytest.fixture
def change(exported: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """change(each): the file with each record changed, and the checksum computed again."""

    def run(each: Change) -> Path:
        path = tmp_path / "changed.kvs"
        with write_archive(path) as writer:
            for record in read_records(exported):
                if record.kind is not RecordKind.SIGNATURE:
                    writer.add(each(copy.deepcopy(record)))
        return path

    return run


def of(kind: RecordKind, edit: Callable[[Record], Record | None]) -> Change:
    """Change the records of a kind; `edit` returns another record or edits the value in place."""

    def run(record: Record) -> Record:
        return (edit(record) or record) if record.kind is kind else record

    return run


def set_state(**fields: Any) -> Change:
    """Change fields of the worker's state."""

    def edit(record: Record) -> Record:
        state = pb.SessionState.FromString(record.data)
        state.MergeFrom(pb.SessionState(**fields))
        return replace(record, data=state.SerializeToString())

    return of(RecordKind.STATE, edit)


def set_first_token(record: Record) -> Record:
    return replace(record, data=(4_000_000_000).to_bytes(4, "little") + record.data[4:])


TAMPERED = {
    "id": (
        of(RecordKind.HEADER, lambda r: r.value.update(session="../../../tmp/x{}:*")),
        "is no id of a session",
    ),
    "epoch": (of(RecordKind.SESSION, lambda r: r.value.update(epoch=2**40)), "its epoch is"),
    "turns": (of(RecordKind.SESSION, lambda r: r.value.update(turns=9)), "it has 9 turns"),
    "length": (set_state(length=10**9), "its turn log has"),
    "zeros": (of(RecordKind.STATE, lambda r: replace(r, data=bytes(50))), "cannot be decoded"),
    "selection": (set_state(selection=b"\x08"), "cannot be decoded"),
    "token": (of(RecordKind.TURN, set_first_token), "has token 4000000000"),
    "role": (
        of(RecordKind.TURN, lambda r: r.value["messages"][0].update(role="root")),
        "of the role 'root'",
    ),
    "surrogate": (
        of(RecordKind.TURN, lambda r: r.value["messages"][0].update(content="\ud800")),
        "half a character",
    ),
    "time": (
        of(RecordKind.SESSION, lambda r: r.value.update(updated_at=float("inf"))),
        "finite number",
    ),
    "count": (
        of(RecordKind.TURN, lambda r: r.value["outcome"].update(prompt_tokens=10**6)),
        "counts more tokens",
    ),
    "settings": (
        of(RecordKind.SESSION, lambda r: r.value["settings"].update(template_arguments="[]")),
        "template_arguments is no JSON object",
    ),
    "salt": (
        of(RecordKind.SESSION, lambda r: r.value["settings"].update(cache_salt="s" * 257)),
        "cache_salt has 257 characters",
    ),
    "memory": (
        of(RecordKind.SESSION, lambda r: r.value["settings"].update(remember="m" * 257)),
        "the name of its memory has 257 characters",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_file_whose_values_do_not_add_up_is_refused(
    name: str, command: Command, change: Callable[[Change], Path], tmp_path: Path
) -> None:
    tampered, sentence = TAMPERED[name]
    data = tmp_path / "elsewhere"
    found = command("import", change(tampered), "--data", data)
    output = " ".join(found.output.split())
    assert (found.exit_code, "Traceback" in output) == (2, False)
    assert sentence in output
    assert "Export the session again" in output
    assert not list((data / "pages").glob("*.kv"))


def test_the_tenant_comes_from_the_command_line(
    command: Command, change: Callable[[Change], Path], tmp_path: Path
) -> None:
    file = change(of(RecordKind.SESSION, lambda r: r.value["settings"].update(tenant="victim")))
    data = tmp_path / "elsewhere"
    assert command("import", file, "--data", data).exit_code == 0
    assert command("import", file, "--data", data, "--as", "s_2", "--tenant", "ann").exit_code == 0
    with closing(sqlite3.connect(data / "catalog.sqlite3")) as db:
        assert sorted(row[0] for row in db.execute("SELECT tenant FROM sessions")) == ["", "ann"]


def test_a_file_is_known_again_by_its_signature(
    command: Command, served: Any, exported: Path, change: Callable[[Change], Path], tmp_path: Path
) -> None:
    unsigned = change(lambda record: record)

    def run(file: Path, data: Path, name: str, *options: str) -> tuple[int, str]:
        found = command("import", file, "--data", data, "--as", name, *options)
        return found.exit_code, " ".join(found.output.split())

    strict = "--require-signature"
    here, there = served.data, tmp_path / "elsewhere"
    code, output = run(exported, here, "s_1", strict)
    assert (code, "signed by this installation" in output) == (0, True)
    code, output = run(exported, there, "s_2")
    assert (code, "signed by another installation" in output) == (0, True)
    code, output = run(unsigned, here, "s_3")
    assert (code, "unsigned" in output) == (0, True)
    for file, data in ((unsigned, here), (exported, there)):
        code, output = run(file, data, "s_4", strict)
        assert (code, "--require-signature is given" in output) == (2, True)


def test_a_signed_file_that_was_changed_is_refused_whatever_its_checksum(
    command: Command, served: Any, exported: Path
) -> None:
    raw = bytearray(exported.read_bytes())
    at = raw.index(b"Melnor")
    raw[at : at + 6] = b"Sennor"
    raw[-32:] = blake2b(raw[:-_END_BYTES], digest_size=32).digest()
    exported.write_bytes(raw)
    found = command("import", exported, "--data", served.data, "--as", "s_1")
    assert (found.exit_code, "Traceback" in found.output) == (2, False)
    assert "its signature does not match" in " ".join(found.output.split())


@pytest.fixture(scope="module")
def records(served_once: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The records of a session's file, without pages."""
    file = tmp_path_factory.mktemp("validation") / "catalog.sqlite3"
    shutil.copy(served_once.data / file.name, file)

    async def read() -> SessionDump:
        catalog = await SqliteCatalog.open(file)
        try:
            return await dump_session(catalog, served_once.child)
        finally:
            await catalog.close()

    found = to_records(asyncio.run(read()))
    return [replace(each, value=json.loads(json.dumps(each.value))) for each in found]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 7, 10**9, 2**31, 2**40, 2**63, 10**30]),
    st.sampled_from([float("nan"), float("inf"), -1.5, 1e300]),
    st.sampled_from(["", "x", "{}", "[" * 5000, "\ud800", "../x{}:*"]),
    st.just([]),
    st.just({}),
)


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_mutated_value_is_refused_with_a_sentence_or_harmless(
    records: list[Record], data: Any
) -> None:
    changed = copy.deepcopy(records)
    index = data.draw(st.integers(0, len(changed) - 1))
    record = changed[index]
    if record.data and data.draw(st.booleans()):
        raw = bytearray(record.data)
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        changed[index] = replace(record, data=bytes(raw))
    else:
        mutate(record, data)
    try:
        dump = from_records(changed, f"s_{uuid4().hex}", "")
    except BadSessionFile:
        return
    if findings := validate_session(dump, BOUNDS):
        assert all(each.isprintable() and " " in each for each in findings)
        return
    with TemporaryDirectory() as folder:
        asyncio.run(restore(Path(folder) / "c.db", dump))


def mutate(record: Record, data: Any) -> None:
    """Replace one value anywhere in a record."""
    places = list(walk([record.value]))
    holder, key = places[data.draw(st.integers(0, len(places) - 1))]
    new = data.draw(SCALARS)
    if holder[key] is record.value:
        object.__setattr__(record, "value", new)
    else:
        holder[key] = new


def walk(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from walk(value[key])


async def restore(path: Path, dump: SessionDump) -> None:
    """Restore a session and read all of it again."""
    catalog = await SqliteCatalog.open(path)
    try:
        await catalog.sessions.restore(dump)
        found = await dump_session(catalog, dump.session.id)
        assert not validate_session(found, BOUNDS)
    finally:
        await catalog.close()


def test_fsck_finds_what_import_refuses(command: Command, served: Any) -> None:
    with closing(sqlite3.connect(served.data / "catalog.sqlite3")) as db, db:
        db.execute("UPDATE sessions SET epoch = 1 << 40 WHERE id = ?", (served.parent,))
    found = command("fsck", "--data", served.data)
    output = " ".join(found.output.split())
    assert (found.exit_code, "Traceback" in output) == (1, False)
    assert "its epoch is 1099511627776" in output
    assert "restore a backup of the catalog" in output
