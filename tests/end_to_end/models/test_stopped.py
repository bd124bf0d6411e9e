"""Commands on the data of a stopped server: checks find damaged and left states, sessions move as files."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrecall_server.admin.fsck import DEAD, REBUILT
from kvrecall_server.cli.commands import app
from services.catalog.sqlite.catalog import SqliteCatalog
from tests.end_to_end.models.conversation import Begin, Conversation, Undisturbed
from tests.end_to_end.models.kinds import RECURRENT_KIND
from tests.end_to_end.servers import Server

HYBRID = pytest.mark.parametrize("kind", [RECURRENT_KIND], indirect=True)
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Run:
    """run(command, ..., data): run a command of kvrecall; its exit code and its output."""
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: str | Path, data: Path) -> tuple[int, str]:
        options = [*arguments, "--data", data, "--model", folder]
        found = CliRunner().invoke(app, [str(each) for each in options])
        assert "Traceback" not in found.output
        return found.exit_code, " ".join(found.output.split())

    return command


@pytest.fixture
def used(new_server: Callable[..., Server], begin: Begin) -> Iterator[tuple[Server, Conversation]]:
    """A server that was killed after two turns of a session and one of its fork."""
    server = new_server()
    server.start()
    conversation = begin(server, turns=2)
    conversation.fork().until(3)
    server.kill()
    yield server, conversation
    server.kill()


def states_of(server: Server) -> Path:
    """The newest file of states."""
    return max((server.data / "states" / "pages").glob("segment-*.kv"))


def test_a_directory_is_clean(kind: str, used: tuple[Server, Conversation], run: Run) -> None:
    server, _ = used
    code, output = run("fsck", data=server.data)
    assert code == 0, output
    assert "2 sessions" in output
    assert ("states in nvme: " in output) == (kind == RECURRENT_KIND)


@HYBRID
def test_damaged_states_are_found(used: tuple[Server, Conversation], run: Run) -> None:
    server, conversation = used
    path = states_of(server)
    content = bytearray(path.read_bytes())
    for at in range(100_000, len(content), 50_000):
        content[at] ^= 4
    path.write_bytes(content)
    code, output = run("fsck", data=server.data)
    assert code == 1
    assert f"session {conversation.session}" in output
    assert "unreadable: its checksum does not match" in output
    assert REBUILT in output


@HYBRID
def test_a_missing_state_is_found(used: tuple[Server, Conversation], run: Run) -> None:
    server, _ = used
    states_of(server).unlink()
    code, output = run("fsck", data=server.data)
    assert code == 1
    assert "tokens missing" in output
    assert REBUILT in output


@HYBRID
def test_states_of_deleted_sessions_are_found_and_deleted(
    used: tuple[Server, Conversation], run: Run
) -> None:
    server, _ = used

    async def delete_all() -> None:
        catalog = await SqliteCatalog.open(server.data / "catalog.sqlite3")
        for session in await catalog.sessions.get_ids():
            await catalog.sessions.delete(session, None)
        await catalog.close()

    asyncio.run(delete_all())
    code, output = run("fsck", data=server.data)
    assert code == 0
    assert "states of no session" in output
    assert DEAD in output
    assert "states of no session deleted now" in run("fsck", "--repair", data=server.data)[1]
    assert "of no session" not in run("fsck", data=server.data)[1]


def test_a_session_goes_on_where_its_file_was_imported(
    used: tuple[Server, Conversation],
    new_server: Callable[..., Server],
    run: Run,
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    """The file has no states: the first turn computes them again."""
    server, conversation = used
    file = tmp_path / "session.kvs"
    other = new_server()
    assert run("export", conversation.session, file, data=server.data)[0] == 0
    code, output = run("import", file, data=other.data)
    assert code == 0, output
    other.start()
    moved = Conversation(other, conversation.say, conversation.session, conversation.answers)
    assert moved.until(4).answers == undisturbed()
    other.kill()
    assert run("fsck", data=other.data)[0] == 0
