"""What a chat prints about its session."""

from dataclasses import asdict, replace
from datetime import UTC, datetime

from kvrecall.client import (
    KvrecallClient,
    Memory,
    Passage,
    PastRepair,
    Repair,
    RepairTotals,
    Turn,
    TurnEpisode,
    TurnMemory,
    TurnRemembered,
    TurnRetrieval,
    Usage,
)
from kvrecall_server.cli.chat.view import (
    memory_line,
    memory_text,
    repair_text,
    repairs_line,
    session_line,
)


def test_the_line_after_a_turn_has_rows_bytes_and_seconds() -> None:
    held = (
        "900 rows: 192 active of 256 · 708 evicted · 2.0 KiB active · 3.0 MiB stored"
        " · first token 0.25 s of 1.50 s"
    )
    assert memory_line(TURN, 1.5) == held
    stays = replace(TURN, episode=TurnEpisode("1-2", 0.5, False, 0, 0, 0, 0.0))
    assert memory_line(stays, 1.5) == f"{held} · episode 1-2"
    switches = replace(TURN, episode=TurnEpisode("1-3", 0.5, True, 120, 0, 3072, 0.0))
    assert memory_line(switches, 1.5) == f"{held} · episode 1-3 (120 rows moved, 3.0 KiB)"
    retrieves = replace(TURN, retrieval=TurnRetrieval(12, 640, 0.1, refused=False))
    assert memory_line(retrieves, 1.5) == f"{held} · 640 rows retrieved in 12 steps"
    remembers = replace(TURN, remembered=TurnRemembered(5, 320, 0, ("s_1", "s_2")))
    assert memory_line(remembers, 1.5) == f"{held} · 320 tokens of 2 sessions remembered"
    refused = replace(TURN, retrieval=TurnRetrieval(0, 0, 0.0, refused=True))
    assert memory_line(refused, 1.5).endswith("the answer saw active rows alone")


def test_the_first_line_says_what_the_chat_goes_on_with(
    server: str, client: KvrecallClient
) -> None:
    unnamed, named = client.create_session(), client.create_session(metadata={"name": "ann"})
    assert session_line(unnamed) == f"session {unnamed.id}"
    assert session_line(named) == f"session ann ({named.id})"
    client.turn(named.id, "Hello.", max_tokens=2)
    now = client.get_session(named.id)
    line = session_line(now)
    assert line.startswith(
        f"session ann ({named.id}) goes on: 1 turn, {now.length} tokens, since 20"
    )
    for session in (unnamed, named):
        client.delete_session(session)


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


TURN = Turn(
    session="s_1",
    turn=3,
    message=None,
    finish_reason="stop",
    usage=Usage(10, 5),
    memory=turn_memory(),
    seconds={"prefill": 0.25},
    durable=True,
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
        started_at=None,
        call_id=None,
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


def current(*layers: int, in_slot: bool = True) -> Memory:
    return Memory(
        session="s",
        length=900,
        budget=256,
        active_rows=192,
        peak_rows=320,
        bound_rows=384,
        active_bytes=2048,
        evicted_rows=708,
        promoted_rows=12,
        tier_bytes={"ram": 1 << 20, "nvme": 3 << 20},
        layer_active_rows=layers,
        layer_peak_rows=layers,
        layer_bound_rows=layers,
        in_slot=in_slot,
        retrieval_bytes=0,
    )


def test_the_current_memory_has_rows_layers_and_tiers() -> None:
    lines = [line.strip() for line in memory_text(current(192, 192)).splitlines()]
    assert lines == [
        "rows      900 in the session, 708 evicted, 12 promoted",
        "active    192 of a budget of 256, at most 320 so far; the bound is 384",
        "by layer  192 in every layer",
        "bytes     2.0 KiB active · stored: ram 1.0 MiB · nvme 3.0 MiB",
        "slot      resident",
    ]
    uneven = memory_text(current(150, 234, in_slot=False))
    assert "by layer  150 234" in uneven
    assert "swapped out" in uneven


def test_the_memory_of_a_session_without_rows_is_shown() -> None:
    assert "by layer  none" in memory_text(current())
