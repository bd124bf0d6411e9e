"""A chat in the terminal."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrecall.client import KvrecallClient
from kvrecall_server.cli.chat.command import Talk
from reference import MODEL_PATH

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "ticket_owner", "arguments": '{"ticket": "123"}'},
}


def test_every_reply_is_followed_by_the_sessions_memory(
    command: Callable[..., Any], server: str
) -> None:
    typed = "Please note that Anna's badge is R12.\nDo you remember Anna's badge?\n\n"
    options = ("--budget", "64", "--research", '{"method": "snapkv", "repair_rows": 16}')
    found = command("chat", "--url", server, *options, typed=typed)
    assert found.exit_code == 0, found.output
    assert "test instrument" in found.output
    assert found.output.count("active of 64") >= 2


def test_a_chat_continues_a_session_with_a_pending_tool_call(
    command: Callable[..., Any], server: str, client: KvrecallClient
) -> None:
    session = client.create_session(budget=64, research={"method": "snapkv", "repair_rows": 16}).id
    asked = {"role": "user", "content": "Who owns ticket 123?"}
    client.turn(
        session,
        [asked, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        generate=False,
    )
    found = command("chat", "--url", server, "--session", session, typed='{"owner": "Anna"}\n\n')
    assert found.exit_code == 0, found.output
    assert 'ticket_owner({"ticket": "123"})' in found.output
    after = client.get_session(session)
    assert after.turns >= 2
    client.delete_session(session)


def test_a_chat_goes_on_in_the_session_of_its_name(
    command: Callable[..., Any], server: str, client: KvrecallClient
) -> None:
    began = command("chat", "--url", server, "--session", "ann", typed="Hello.\n\n")
    again = command("chat", "--url", server, "--session", "ann", typed="Hello again.\n\n")
    other = command("chat", "--url", server, "--session", "an", typed="\n")
    assert (began.exit_code, again.exit_code, other.exit_code) == (0, 0, 0), again.output
    assert "goes on" not in began.output
    assert "goes on: 1 turn, " in again.output
    assert "goes on" not in other.output, "part of a name is another name"
    sessions = {each.metadata["name"]: each for each in client.list_sessions(q="an").sessions}
    assert {name: each.turns for name, each in sessions.items()} == {"ann": 2, "an": 0}
    for each in sessions.values():
        client.delete_session(each)


def test_an_unknown_id_is_no_name(command: Callable[..., Any], server: str) -> None:
    found = command("chat", "--url", server, "--session", "s_123", typed="\n")
    assert found.exit_code != 0
    assert "there is no session s_123" in found.output


def test_a_named_chat_without_a_server_is_kept_where_serve_keeps_its_sessions(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_DATA", str(tmp_path / "data"))
    options = ("--model", str(MODEL_PATH), "--session", "ann", "--max-tokens", "4")
    began = command("chat", *options, typed="Hello.\n\n")
    again = command("chat", *options, typed="Hello again.\n\n")
    assert (began.exit_code, again.exit_code) == (0, 0), again.output
    assert "goes on: 1 turn, " in again.output


def test_a_refused_message_does_not_end_the_chat(command: Callable[..., Any], server: str) -> None:
    typed = "we talked about the garden " * 1500 + "\nHello.\n\n"
    found = command("chat", "--url", server, "--no-recall", typed=typed)
    assert found.exit_code == 0, found.output
    assert "turn_too_long" in found.output
    assert " active of " in found.output


def test_the_repairs_command_shows_promoted_text(command: Callable[..., Any], server: str) -> None:
    facts = " ".join(f"Locker {number} has the code {number * 37}." for number in range(40))
    typed = f"/repairs\n{facts}\nWhich code has locker 3?\n/repairs\n\n"
    options = ("--budget", "64", "--research", '{"method": "snapkv", "repair_rows": 16}')
    found = command("chat", "--url", server, *options, typed=typed)
    assert found.exit_code == 0, found.output
    assert "no repair yet" in found.output
    assert "repaired on" in found.output
    assert "signal: Which code has locker 3?" in found.output
    assert "Locker" in found.output.split("signal: Which code has locker 3?")[1]


def test_a_command_is_never_sent_to_the_model(
    command: Callable[..., Any], server: str, client: KvrecallClient
) -> None:
    session = client.create_session(budget=64).id
    typed = "/help\n/memory\n/repairs\n/nonsense of mine\n/help me\n/quit\nHello.\n"
    found = command("chat", "--url", server, "--session", session, typed=typed)
    assert found.exit_code == 0, found.output
    for shown in ("/memory", "/repairs", "/quit", "the bound is", "no repair yet"):
        assert shown in found.output
    assert found.output.count("there is no command") == 2
    assert "there is no command /nonsense" in found.output
    assert client.get_session(session).turns == 0
    client.delete_session(session)


def test_a_message_may_begin_with_a_slash_that_is_doubled(
    command: Callable[..., Any], server: str, client: KvrecallClient
) -> None:
    session = client.create_session(budget=64).id
    typed = "//help is a command\n/memory\n/quit\n"
    found = command("chat", "--url", server, "--session", session, typed=typed)
    assert found.exit_code == 0, found.output
    after = client.get_session(session)
    assert after.turns == 1
    assert f"{after.length} in the session" in found.output
    client.delete_session(session)


def test_a_refused_command_does_not_end_the_chat(
    client: KvrecallClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.create_session(budget=64).id
    printed = StringIO()
    console = Console(file=printed, width=160)
    lines = iter(["/memory", "/help", "/quit"])

    def read(_: str) -> str:
        if (line := next(lines)) == "/memory":
            client.delete_session(session)
        return line

    monkeypatch.setattr(console, "input", read)
    Talk(client.attach(session), console, 8).run([])
    shown = printed.getvalue()
    assert "unknown_session" in shown
    assert "end the chat" in shown.split("unknown_session")[1]


def test_a_model_that_is_not_there_is_refused_before_a_server_is_started(
    command: Callable[..., Any],
) -> None:
    found = command("chat", "--model", "nowhere.gguf")
    assert found.exit_code == 2
    assert "nowhere.gguf cannot be read" in found.output
