"""Arguments of the chat template change what every API renders, and so does what clients wish of reasoning."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from typer.testing import CliRunner

from faults.rig.ports import free_port
from kvrecall.client import AsyncKvrecallClient
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from kvrecall.protocol.sessions_v1.sessions_pb2_grpc import SessionsStub
from kvrecall_server.cli.commands import app
from tests.end_to_end.byte_models import save_byte_model
from tests.end_to_end.servers import Json, Server
from tests.workers.byte_level import make_byte_level
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.thinking import QWEN3, QWEN3_ADDED, QWEN3_END, QWEN3_MARKS

TEMPLATE = f"""
{{%- if reasoning_effort is defined -%}}<|im_start|>system
Reasoning: {{{{ reasoning_effort }}}}<|im_end|>
{{% endif -%}}{QWEN3}"""
OFF: Json = {"chat_template_kwargs": {"enable_thinking": False}}
HIGH: Json = {"chat_template_kwargs": {"reasoning_effort": "high"}}
HELLO: list[Json] = [{"role": "user", "content": "Hello."}]
ANSWER: Json = {"max_tokens": 1, "temperature": 0}
PLAIN = len("_user\nHello._\n_assistant\n")
"""Tokens of the prompt: each mark is one, and each other letter."""
NOT_REASONED = len("__\n\n") + 2
"""Tokens of a reasoning that is over before the answer begins: two marks, four ends of lines."""
EFFORT_HIGH = len("_system\nReasoning: high_\n")

Count = Callable[[Server, Json], int]


@pytest.fixture(scope="module")
def address() -> str:
    """Address of the gRPC API."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(
    new_server: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory, address: str
) -> Iterator[Server]:
    """A server of a tiny model whose template reads `enable_thinking` and `reasoning_effort`."""
    inner = make_byte_level(TEMPLATE, QWEN3_END, QWEN3_MARKS, QWEN3_ADDED)
    folder = save_byte_model(DENSE["qwen3"], inner, tmp_path_factory.mktemp("model") / "reads")
    server = new_server(KVRECALL_MODEL=str(folder), KVRECALL_GRPC__LISTEN=address)
    server.start()
    yield server
    server.kill()


def post(server: Server, path: str, body: Json) -> Json:
    """Send a request of an API for stateless clients; returns the response and what was ignored."""
    (model,) = server.http.get("/v1/models").raise_for_status().json()["data"]
    response = server.http.post(path, json={"model": model["id"], **body})
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found | {"ignored": response.headers.get("kvrecall-ignored", "")}


def count_by_chat(server: Server, options: Json) -> int:
    answer = post(server, "/v1/chat/completions", {"messages": HELLO, **ANSWER, **options})
    assert answer["ignored"] == ""
    tokens: int = answer["usage"]["prompt_tokens"]
    return tokens


def count_by_response(server: Server, options: Json) -> int:
    body = {"input": HELLO, "max_output_tokens": 1, "temperature": 0, **options}
    answer = post(server, "/v1/responses", body)
    assert answer["ignored"] == ""
    tokens: int = answer["usage"]["input_tokens"]
    assert post(server, "/v1/responses/input_tokens", body)["input_tokens"] == tokens
    return tokens


def count_by_message(server: Server, options: Json) -> int:
    body = {"messages": HELLO, **ANSWER, **options}
    answer = post(server, "/v1/messages", body)
    assert answer["ignored"] == ""
    usage = answer["usage"]
    tokens: int = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert post(server, "/v1/messages/count_tokens", body)["input_tokens"] == tokens
    return tokens


def count_by_tokenize(server: Server, options: Json) -> int:
    tokens: int = post(server, "/tokenize", {"messages": HELLO, **options})["count"]
    return tokens


def count_by_session(server: Server, options: Json) -> int:
    session = server.http.post("/v1/sessions", json=options).raise_for_status().json()
    assert session["chat_template_kwargs"] == options.get("chat_template_kwargs", {})
    turns = f"/v1/sessions/{session['id']}/turns"
    turn = server.http.post(turns, json={"messages": HELLO, **ANSWER}).raise_for_status().json()
    tokens: int = turn["usage"]["prompt_tokens"]
    return tokens


def count_by_client(server: Server, options: Json) -> int:
    with server.own.session(**options) as session:
        return session.say("Hello.", **ANSWER).usage.prompt_tokens


def count_by_async_client(server: Server, options: Json) -> int:
    async def count() -> int:
        async with AsyncKvrecallClient(server.url) as client, client.session(**options) as session:
            return (await session.say("Hello.", **ANSWER)).usage.prompt_tokens

    return asyncio.run(count())


def count_by_rpc(server: Server, options: Json) -> int:
    arguments = Struct()
    arguments.update(options.get("chat_template_kwargs", {}))
    assert server.serving is not None
    address = server.serving.environment["KVRECALL_GRPC__LISTEN"]
    with grpc.insecure_channel(address) as channel:
        sessions: Any = SessionsStub(channel)
        request = pb.CreateSessionRequest(chat_template_kwargs=arguments if options else None)
        session = sessions.CreateSession(request)
        hello = pb.Message(role=pb.ROLE_USER, content="Hello.")
        turn = sessions.SendTurn(
            pb.SendTurnRequest(session=session.id, messages=[hello], max_tokens=1)
        )
        tokens: int = turn.usage.prompt_tokens
        return tokens


COUNTS: dict[str, Count] = {
    "chat completions": count_by_chat,
    "responses": count_by_response,
    "messages": count_by_message,
    "tokenize": count_by_tokenize,
    "REST": count_by_session,
    "client": count_by_client,
    "async client": count_by_async_client,
    "gRPC": count_by_rpc,
}


@pytest.mark.parametrize("api", COUNTS)
def test_arguments_change_the_prompt_in_every_api(server: Server, api: str) -> None:
    count = COUNTS[api]
    assert count(server, {}) == PLAIN
    assert count(server, OFF) == PLAIN + NOT_REASONED
    assert count(server, HIGH) == PLAIN + EFFORT_HIGH


@pytest.mark.parametrize(
    ("api", "wish", "more"),
    [
        ("chat completions", {"reasoning_effort": "high"}, EFFORT_HIGH),
        ("chat completions", {"reasoning_effort": "none"}, EFFORT_HIGH + NOT_REASONED),
        ("chat completions", {"enable_thinking": False}, NOT_REASONED),
        ("responses", {"reasoning": {"effort": "high"}}, EFFORT_HIGH),
        ("responses", {"reasoning": {"effort": "none"}}, EFFORT_HIGH + NOT_REASONED),
        ("responses", {"enable_thinking": False}, NOT_REASONED),
        ("messages", {"thinking": {"type": "disabled"}}, NOT_REASONED),
        ("messages", {"thinking": {"type": "enabled"}}, 0),
        ("messages", {"output_config": {"effort": "high"}}, EFFORT_HIGH),
        ("messages", {"enable_thinking": False}, NOT_REASONED),
        ("messages", {"thinking": {"type": "disabled"}, **HIGH}, EFFORT_HIGH + NOT_REASONED),
        (
            "messages",
            {
                "thinking": {"type": "disabled"},
                "chat_template_kwargs": {"enable_thinking": True},
            },
            0,
        ),
    ],
)
def test_what_clients_wish_of_reasoning_does_so_too(
    server: Server, api: str, wish: Json, more: int
) -> None:
    assert COUNTS[api](server, wish) == PLAIN + more


def test_a_chat_in_the_terminal_takes_them(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def chat(*options: str) -> str:
        arguments = ["chat", "--url", server.url, "--max-tokens", "1", "--system", "Be kind."]
        found = CliRunner().invoke(app, [*arguments, *options], input="Hello.\n\n")
        return found.output

    def get_length(name: str) -> int:
        (session,) = server.own.list_sessions(q=name).sessions
        return session.length

    chat("--session", "plain")
    chat("--session", "quiet", "--chat-template-kwargs", '{"enable_thinking": false}')
    assert get_length("quiet") - get_length("plain") == NOT_REASONED
    refused = chat("--chat-template-kwargs", "false")
    assert "expected a JSON object" in refused


def test_the_worker_says_what_its_template_reads(server: Server) -> None:
    assert server.own.worker().template_variables == (
        "enable_thinking",
        "opened",
        "reasoning_effort",
    )
    unread: Json = {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"thought": True}}
    answer = post(server, "/v1/messages", {"messages": HELLO, **ANSWER, **unread})
    assert answer["ignored"] == "chat_template_kwargs.thought"
