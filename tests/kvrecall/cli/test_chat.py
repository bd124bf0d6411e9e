"""A chat in the terminal."""

from collections.abc import Callable
from typing import Any

from kvrecall.cli.chat import memory_line, repair_text, repairs_line
from kvrecall.client.client import KvrecallClient

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "ticket_owner", "arguments": '{"ticket": "123"}'},
}


def test_every_turn_is_answered_and_followed_by_what_the_session_holds(
    command: Callable[..., Any], server: str
) -> None:
    typed = "Please note that Anna's badge is R12.\nDo you remember Anna's badge?\n\n"
    found = command("chat", "--url", server, "--budget", "64", "--repair-rows", "16", typed=typed)
    assert found.exit_code == 0, found.output
    assert "test instrument" in found.output
    assert found.output.count("active of 64") >= 2


def test_a_chat_goes_on_with_a_session_that_waits_for_a_tool(
    command: Callable[..., Any], server: str, client: KvrecallClient
) -> None:
    session = client.create_session(budget=64, repair_rows=16)["id"]
    asked = {"role": "user", "content": "Who owns ticket 123?"}
    client.turn(
        session,
        [asked, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        generate=False,
    )
    found = command("chat", "--url", server, "--session", session, typed='{"owner": "Anna"}\n\n')
    assert found.exit_code == 0, found.output
    assert 'ticket_owner({"ticket": "123"})' in found.output
    after = client.get(session)
    assert after["turns"] >= 2
    client.delete(session)


def test_a_refused_message_does_not_end_the_chat(command: Callable[..., Any], server: str) -> None:
    typed = "we talked about the garden " * 1500 + "\nHello.\n\n"
    found = command("chat", "--url", server, "--method", "full", typed=typed)
    assert found.exit_code == 0, found.output
    assert "turn_too_long" in found.output
    assert "active of 256" in found.output


def test_the_line_after_a_turn_tells_rows_bytes_and_seconds() -> None:
    memory = {
        "length": 900,
        "budget": 256,
        "active_rows": 192,
        "evicted_rows": 708,
        "active_bytes": 2048,
        "tier_bytes": {"ram": 1 << 20, "nvme": 3 << 20},
    }
    held = "900 rows: 192 active of 256 · 708 evicted · 2.0 KiB active · 3.0 MiB stored · 1.50 s"
    assert memory_line({"memory": memory, "episode": None}, 1.5) == held
    stays = {"episode": "1-2", "switched": False, "rows_moved": 0, "bytes_moved": 0}
    assert memory_line({"memory": memory, "episode": stays}, 1.5) == f"{held} · episode 1-2"
    switches = {"episode": "1-3", "switched": True, "rows_moved": 120, "bytes_moved": 3072}
    line = memory_line({"memory": memory, "episode": switches}, 1.5)
    assert line == f"{held} · episode 1-3 (120 rows moved, 3.0 KiB)"


CUT = {
    "trigger": "tool_call",
    "promoted": 40,
    "demoted": 30,
    "seconds": 0.25,
    "share_scanned": 0.5,
    "truncated": True,
}
WHOLE = {
    "trigger": "tool_result",
    "promoted": 24,
    "demoted": 0,
    "seconds": 0.012,
    "share_scanned": 1.0,
    "truncated": False,
}


def test_the_line_about_repairs_tells_signals_rows_time_and_how_far_they_came() -> None:
    memory = {"repairs": [CUT, WHOLE], "repair": {"skipped": 1}}
    assert repairs_line(memory) == (
        "repaired on tool_call: 40 promoted, 30 demoted, 250 ms, 50% scanned, truncated"
        " · tool_result: 24 promoted, 0 demoted, 12 ms, 100% scanned · 1 left out"
    )


def test_a_repair_is_shown_with_its_signal_and_its_passages() -> None:
    passages = [
        {"start": 7, "stop": 9, "before": "so\nthe code", "promoted": " is 12", "after": " of"}
    ]
    shown = repair_text(
        {**WHOLE, "turn": 4, "signal": "code?", "passages": passages}
    ).plain.splitlines()
    assert (
        shown[0].strip() == "for turn 4, tool_result: 24 promoted, 0 demoted, 12 ms, 100% scanned"
    )
    assert [line.strip() for line in shown[1:]] == [
        "looked for: code?",
        "7  …so↵the code is 12 of…",
    ]


def test_what_came_back_can_be_looked_at(command: Callable[..., Any], server: str) -> None:
    told = " ".join(f"Locker {number} has the code {number * 37}." for number in range(40))
    typed = f"/repairs\n{told}\nWhich code has locker 3?\n/repairs\n\n"
    found = command("chat", "--url", server, "--budget", "64", "--repair-rows", "16", typed=typed)
    assert found.exit_code == 0, found.output
    assert "nothing was repaired yet" in found.output
    assert "repaired on" in found.output
    assert "looked for: Which code has locker 3?" in found.output
    assert "Locker" in found.output.split("looked for: Which code has locker 3?")[1]
