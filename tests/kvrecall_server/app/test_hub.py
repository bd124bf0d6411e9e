"""Names on the hub: a real client of the hub asks a server in its place."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROGRAM = (
    "import sys; from kvrecall_server.app.hub import check_hub_model; check_hub_model(sys.argv[1])"
)
ERRORS = {
    "/no-such/model": (404, "RepoNotFound"),
    "/some/ggufs": (404, "EntryNotFound"),
    "/some/gated": (403, "GatedRepo"),
}


class Hub(BaseHTTPRequestHandler):
    """Answers HEAD as the hub does for names that are not there, not open, or of other files."""

    def do_HEAD(self) -> None:
        status, code = next(
            (error for name, error in ERRORS.items() if self.path.startswith(name)), (200, "")
        )
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "2")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Address of a server in the hub's place."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def check(name: str, cache: Path, **environment: str) -> str:
    """The last line of the error, or nothing."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "HF_HOME": str(cache), **environment},
    )
    return ended.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no-such/model", "the hub has no model no-such/model"),
        ("some/ggufs", "has no config.json: of a repository of GGUF files, download one"),
        ("some/gated", "accept them on its page there"),
    ],
)
def test_what_the_hub_says_of_a_name_is_said_with_what_to_do(
    endpoint: str, tmp_path: Path, name: str, why: str
) -> None:
    assert why in check(name, tmp_path, HF_ENDPOINT=endpoint)


def test_a_model_on_the_hub_is_accepted(endpoint: str, tmp_path: Path) -> None:
    assert check("some/model", tmp_path, HF_ENDPOINT=endpoint) == ""


def test_without_a_hub_the_cache_decides(tmp_path: Path) -> None:
    unreachable = "http://127.0.0.1:1"
    refused = check("some/model", tmp_path, HF_ENDPOINT=unreachable)
    assert "some/model is not on this machine, and the hub cannot be asked" in refused
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    (cached / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("a" * 40) / "config.json").write_text("{}")
    assert check("some/model", tmp_path, HF_ENDPOINT=unreachable) == ""
    near = check("some/modle", tmp_path, HF_ENDPOINT=unreachable)
    assert "did you mean some/model, which is here?" in near
    assert check("some/model", tmp_path, HF_HUB_OFFLINE="1") == ""
