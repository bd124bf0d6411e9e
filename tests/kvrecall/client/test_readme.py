"""Python snippet of the README: executed as it stands, against a real server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall import KvrecallClient
from kvrecall.app.local_server import ServerNeeds, server_at

README = Path(__file__).parents[3] / "README.md"
DEFAULT_URL = "http://127.0.0.1:8420"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a real server process with the reference model."""
    with server_at(None, ServerNeeds(slots=2, max_budget=1024)) as url:
        yield url


def test_the_readmes_snippet_runs_and_prints_the_remembered_fact(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    match = re.search(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert match is not None, "the README has no Python block"
    snippet = match.group(1)
    assert "from kvrecall import KvrecallClient" in snippet
    assert DEFAULT_URL in snippet
    exec(compile(snippet.replace(DEFAULT_URL, server), str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "The extension list says Melnor K4821." in printed
    assert re.search(r"\d+ of \d+ rows active", printed)
    with KvrecallClient(server) as client:
        assert client.list_sessions().sessions == ()
