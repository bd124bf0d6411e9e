"""A chat in the terminal."""

from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from kvrecall.cli.chat import memory_line, repair_text, repairs_line
from kvrecall.client import (
    KvrecallClient,
    Passage,
    PastRepair,
    Repair,
    RepairTotals,
    TurnEpisode,
    TurnMemory,
)

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "ticket_owner", "arguments": '{"ticket": "123"}'},
}


def test_every_reply_is_followed_by_the_sessions_memory(
    command: Callable[..., Any], server: str
) -> None:
    typed = "Please note that Anna's badge is R12.\nDo you remember Anna's badge?\n\n"
    found = command("chat", "--url", server, "--budget", "64", "--repair-rows", "16", typed=typed)
    assert found.exit_code == 0, found.output
    assert "test instrument" in found.output
    assert found.output.count("active of 64") >= 2


def test_a_chat_continues_a_session_with_a_pending_tool_call(
    command: Callable[..., Any], server: str, client: KvrecallClient
) -> None:
    session = client.create_session(budget=64, repair_rows=16).id
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


def test_a_refused_message_does_not_end_the_chat(command: Callable[..., Any], server: str) -> None:
    typed = "we talked about the garden " * 1500 + "\nHello.\n\n"
    found = command("chat", "--url", server, "--method", "full", typed=typed)
    assert found.exit_code == 0, found.output
    assert "turn_too_long" in found.output
    assert "active of 256" in found.output


def test_the_line_after_a_turn_has_rows_bytes_and_seconds() -> None:
    memory = turn_memory()
    held = "900 rows: 192 active of 256 · 708 evicted · 2.0 KiB active · 3.0 MiB stored · 1.50 s"
    assert memory_line(memory, None, 1.5) == held
    stays = TurnEpisode("1-2", 0.5, False, 0, 0, 0, 0.0)
    assert memory_line(memory, stays, 1.5) == f"{held} · episode 1-2"
    switches = TurnEpisode("1-3", 0.5, True, 120, 0, 3072, 0.0)
    line = memory_line(memory, switches, 1.5)
    assert line == f"{held} · episode 1-3 (120 rows moved, 3.0 KiB)"


TRUNCATED = Repair(
    trigger="tool_call",
    signal_tokens=8,
    observed_tokens=8,
    candidates=100,
    scored_rows=50,
    share_scanned=0.5,
    promoted=40,
    demoted=30,
    seconds=0.25,
    truncated=True,
    hops=1,
    bytes_read=0,
    in_pause=False,
)
COMPLETE = replace(
    TRUNCATED,
    trigger="tool_result",
    scored_rows=100,
    share_scanned=1.0,
    promoted=24,
    demoted=0,
    seconds=0.012,
    truncated=False,
)


def turn_memory(*repairs: Repair, skipped: int = 0) -> TurnMemory:
    totals = RepairTotals(len(repairs), (), 0, 0, 0, 0.0, 0, skipped)
    return TurnMemory(
        length=900,
        budget=256,
        active_rows=192,
        peak_rows=192,
        bound_rows=384,
        active_bytes=2048,
        evicted_rows=708,
        promoted_rows=0,
        tier_bytes={"ram": 1 << 20, "nvme": 3 << 20},
        repair=totals,
        repairs=repairs,
    )


def test_the_line_about_repairs_has_triggers_rows_times_and_shares_scanned() -> None:
    assert repairs_line(turn_memory(TRUNCATED, COMPLETE, skipped=1)) == (
        "repaired on tool_call: 40 promoted, 30 demoted, 250 ms, 50% scanned, truncated"
        " · tool_result: 24 promoted, 0 demoted, 12 ms, 100% scanned · 1 skipped"
    )


def test_a_repair_is_shown_with_its_signal_and_its_passages() -> None:
    passage = Passage(7, 9, "so\nthe code", " is 12", " of")
    repair = PastRepair(
        **asdict(COMPLETE),
        number=1,
        turn=4,
        at=datetime.now(UTC),
        signal="code?",
        passages=(passage,),
    )
    shown = repair_text(repair).plain.splitlines()
    assert (
        shown[0].strip() == "for turn 4, tool_result: 24 promoted, 0 demoted, 12 ms, 100% scanned"
    )
    assert [line.strip() for line in shown[1:]] == [
        "signal: code?",
        "7  …so↵the code is 12 of…",
    ]


def test_the_repairs_command_shows_promoted_text(command: Callable[..., Any], server: str) -> None:
    facts = " ".join(f"Locker {number} has the code {number * 37}." for number in range(40))
    typed = f"/repairs\n{facts}\nWhich code has locker 3?\n/repairs\n\n"
    found = command("chat", "--url", server, "--budget", "64", "--repair-rows", "16", typed=typed)
    assert found.exit_code == 0, found.output
    assert "no repair yet" in found.output
    assert "repaired on" in found.output
    assert "signal: Which code has locker 3?" in found.output
    assert "Locker" in found.output.split("signal: Which code has locker 3?")[1]
