"""Reasoning of whole histories: kept within a loop of tools, and dropped at the next user's message."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tokenizers import pre_tokenizers
from typer.testing import CliRunner

from kvrecall_server.cli.commands import app
from tests.end_to_end.byte_models import save_byte_model
from tests.end_to_end.servers import Json, Server
from tests.workers.byte_level import make_byte_level
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.thinking import QWEN3, QWEN3_ADDED, QWEN3_END, QWEN3_MARKS

THOUGHT = "I look at it from all sides. " * 8
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MARKS = (QWEN3_END, *QWEN3_MARKS, *QWEN3_ADDED)
NO_LETTERS = {str(i): -100 for i, symbol in enumerate(ALPHABET) if not symbol.isascii()}
NO_LETTERS |= {str(len(ALPHABET) + i): -100 for i in range(len(MARKS))}
"""Answers are characters of one byte, so that their text has their tokens, and no marks."""
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server(
    new_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server of a tiny model whose template drops reasoning as Qwen3's does."""
    folder = save(tmp_path_factory.mktemp("model") / "thinking")
    server = new_server(KVRECALL_MODEL=str(folder))
    server.start()
    yield server
    server.kill()


def save(folder: Path) -> Path:
    """Save a model with a tokenizer of bytes."""
    inner = make_byte_level(QWEN3, QWEN3_END, QWEN3_MARKS, QWEN3_ADDED)
    return save_byte_model(DENSE["qwen3"], inner, folder)


def talk_on(server: Server, messages: list[Json], question: str) -> tuple[list[Json], Json]:
    """Ask one question more; returns the conversation with its answer, and the response."""
    asked = [*messages, {"role": "user", "content": question}]
    found = complete(server, asked)
    return [*asked, {"role": "assistant", "content": get_message(found)["content"]}], found


def begin_thinking(server: Server, about: str) -> list[Json]:
    """A conversation whose first answer's reasoning was dropped when the second question came."""
    messages: list[Json] = [
        {"role": "user", "content": f"Where is {about}? " * 6},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": THOUGHT},
        {"role": "tool", "tool_call_id": "c1", "content": "in the garden " * 5},
    ]
    first = complete(server, messages)
    messages.append({"role": "assistant", "content": get_message(first)["content"]})
    messages, second = talk_on(server, messages, "And now?")
    assert second["match"] == "continued"
    assert get_dropped(second) >= len(THOUGHT.strip())
    return messages


def complete(server: Server, messages: list[Json], salt: str = "", **options: Any) -> Json:
    """Send a whole conversation; returns the response, with what it was matched as."""
    named = {"cache_salt": salt} if salt else {}
    (model,) = server.http.get("/v1/models").raise_for_status().json()["data"]
    body = {
        "model": model["id"],
        "messages": messages,
        "max_tokens": 12,
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": "none",
        "logit_bias": NO_LETTERS,
        **named,
        **options,
    }
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found | {"match": response.headers["kvrecall-match"]}


def check_like_new(server: Server, messages: list[Json], answer: Json, salt: str) -> None:
    """Check that a new session of all these messages has as many tokens and answers the same."""
    fresh = complete(server, messages, salt)
    assert fresh["match"] == "built"
    assert fresh["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert get_message(fresh)["content"] == get_message(answer)["content"]


def get_message(answer: Json) -> Json:
    """The assistant's message."""
    message: Json = answer["choices"][0]["message"]
    return message


def get_dropped(answer: Json) -> int:
    """Tokens that the session lost with the turn."""
    dropped: int = answer["usage"]["kvrecall"]["dropped_tokens"]
    return dropped


@pytest.mark.parametrize("repeats", [True, False], ids=["with its reasoning", "without"])
def test_a_history_goes_on_without_the_reasoning_of_before(server: Server, repeats: bool) -> None:
    asked: list[Json] = [
        {"role": "system", "content": f"You look, {repeats}."},
        {"role": "user", "content": "Where is it? " * 6},
    ]
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "in the garden " * 5}
    first = complete(server, [*asked, {**called, "reasoning_content": THOUGHT}, result])
    bare = complete(server, [*asked, called, result], "bare")
    kept = first["usage"]["prompt_tokens"] - bare["usage"]["prompt_tokens"]
    assert kept >= len(THOUGHT.strip()), "within the loop it is said"
    assert get_dropped(first) == 0
    answer = {"role": "assistant", "content": get_message(first)["content"]}
    again = {**called, "reasoning_content": THOUGHT} if repeats else called
    messages = [*asked, again, result, answer, {"role": "user", "content": "And now?"}]
    second = complete(server, messages)
    assert second["match"] == "continued"
    assert get_dropped(second) >= len(THOUGHT.strip())
    check_like_new(server, messages, second, f"second {repeats}")
    server.kill()
    server.start()
    messages += [
        {"role": "assistant", "content": get_message(second)["content"]},
        {"role": "user", "content": "And then?"},
    ]
    third = complete(server, messages)
    assert third["match"] == "continued"
    check_like_new(server, messages, third, f"third {repeats}")


def test_a_session_may_keep_it(server: Server) -> None:
    messages: list[Json] = [
        {"role": "user", "content": "Is it there?"},
        {"role": "assistant", "content": "yes", "reasoning_content": THOUGHT},
        {"role": "user", "content": "And now?"},
    ]
    kept = complete(server, messages, kvrecall={"keep_reasoning": True})
    dropped = complete(server, messages)
    assert dropped["match"] == "built", "another setting is another session"
    more = kept["usage"]["prompt_tokens"] - dropped["usage"]["prompt_tokens"]
    assert more >= len(THOUGHT.strip())


def test_a_session_that_dropped_reasoning_is_checked_and_moves_as_a_file(
    new_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = save(tmp_path / "model")
    first, other = (new_server(KVRECALL_MODEL=str(folder)) for _ in range(2))

    def run(*arguments: object, server: Server) -> str:
        options = [*arguments, "--data", server.data, "--model", folder]
        found = CliRunner().invoke(app, [str(each) for each in options])
        assert found.exit_code == 0, found.output
        return found.output

    first.start()
    messages = begin_thinking(first, "it")
    with first.client() as client:
        (session,) = [each.id for each in client.list_sessions().sessions]
    expected = get_message(talk_on(first, messages, "And then?")[1])["content"]
    first.kill()
    run("fsck", server=first)
    file = tmp_path / "session.kvs"
    run("export", session, file, server=first)
    run("import", file, server=other)
    other.start()
    # The question that was asked before the session moved is asked again, by its fork.
    _, moved = talk_on(other, messages, "And then?")
    assert get_message(moved)["content"] == expected
    other.kill()
    run("fsck", server=other)


def test_reasoning_is_dropped_on_redis_as_in_files(
    new_server: Callable[..., Server], tmp_path: Path, redis_url: str
) -> None:
    folder = save(tmp_path / "model")
    server = new_server(
        KVRECALL_MODEL=str(folder),
        KVRECALL_CATALOG_URL=redis_url,
        KVRECALL_STORE__REDIS_URL=redis_url,
        KVRECALL_STORE__REDIS_NAMESPACE=uuid4().hex,
    )
    server.start()
    messages = begin_thinking(server, "it")
    server.kill()
    server.start()
    messages, third = talk_on(server, messages, "And then?")
    assert third["match"] == "continued"
    check_like_new(server, messages[:-1], third, "new")
    server.kill()
