"""Python snippets of the README: executed as they stand, against a real server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall import KvrecallClient
from kvrecall_server.app.local.server import ServerNeeds, server_at

README = Path(__file__).parents[3] / "README.md"
DEFAULT_URL = "http://127.0.0.1:8420"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a real server process with the reference model.

    OpenAI's snippet names no length, and a sampled answer of this model may go on to the context's end.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRECALL_SERVICE__DEFAULT_MAX_TOKENS", "60")
        with server_at(None, ServerNeeds(slots=2, max_budget=1024)) as url:
            yield url


def read_snippets() -> list[str]:
    """The README's Python blocks, in order: OpenAI's client, then our own."""
    return re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


def run(snippet: str, server: str) -> None:
    assert DEFAULT_URL in snippet
    exec(compile(snippet.replace(DEFAULT_URL, server), str(README), "exec"), {})


def test_the_readmes_first_snippet_is_answered_by_openais_client(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    snippet, _ = read_snippets()
    assert "from openai import OpenAI" in snippet
    run(snippet, server)
    assert capsys.readouterr().out.strip()


def test_the_readmes_snippet_runs_and_prints_the_remembered_fact(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, snippet = read_snippets()
    assert "from kvrecall import KvrecallClient" in snippet
    with KvrecallClient(server) as client:
        before = client.list_sessions().sessions
        run(snippet, server)
        printed = capsys.readouterr().out
        assert "The extension list says Melnor K4821." in printed
        assert re.search(r"\d+ of \d+ rows active", printed)
        assert client.list_sessions().sessions == before
