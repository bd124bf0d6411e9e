"""The catalog on a real file: what it acknowledges is there afterwards, whole, whatever happens."""

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.catalog import REPAIRS_KEPT, IdempotencyKey, Remembered, RepairCommit, RepairDetails, TurnCommit
from services.errors import (
    CatalogError,
    CatalogVersion,
    IdempotencyConflict,
    InvalidRequest,
    StaleEpoch,
    UnknownCall,
    UnknownSession,
)
from services.messages import Message, ToolCall
from services.reports import Fidelity, MemoryReport, RepairReport, TurnOutcome
from services.sessions import (
    CallStatus,
    RepairTrigger,
    Session,
    SessionSettings,
    SessionState,
    Turn,
    due_repairs,
)
from services.sqlite_catalog import SqliteCatalog

MEMORY = MemoryReport(7, 64, 7, 8, 96, 448, 0, 2, (7, 6), (8, 8), (96, 96), {"ram": 10}, True)
REPAIR = RepairReport("tool_call", 3, 7, 2, 0.5, candidates=9, demoted=1, cut=True, hops=2, bytes_read=5, in_pause=True)


@pytest.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[SqliteCatalog]:
    catalog = await SqliteCatalog.open(tmp_path / "catalog.db", idempotency_records=3)
    yield catalog
    await catalog.close()


def new(id: str, created: float = 1.0, **settings: object) -> Session:
    chosen = SessionSettings(**{"budget": 64, "repair_rows": 8, "method": "snapkv"} | settings)
    return Session(id, 1, chosen, created, created, 0, MemoryReport(budget=64))


def turn(session: str, number: int, *calls: ToolCall) -> TurnCommit:
    message = Message("assistant", f"answer {number}", calls)
    outcome = TurnOutcome(
        session, number, message, "stop", 3, 2, MEMORY, (REPAIR,), {"decode": 0.5}, Fidelity(5, 0.25, 0.5), REPAIR
    )
    said = (Message("user", f"turn {number}"),)
    return TurnCommit(Turn(session, number, said, (1, 2, 2**32 - 1), outcome), b"state %d" % number, calls)


CALLS = (ToolCall("a", "look", '{"n": 1}'), ToolCall("b", "look", '{"n": 2}'))


async def test_a_session_comes_back_as_it_was_stored(catalog: SqliteCatalog) -> None:
    session = new(
        "s", seed=2**63, tools=('{"x": 1}',), metadata={"user": "é\0"}, repair_on=frozenset({RepairTrigger.TURN})
    )
    await catalog.create(session, b"\0state", None)
    assert await catalog.session("s") == session
    assert await catalog.worker_state("s") == b"\0state"


async def test_a_turn_comes_back_as_it_was_committed(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1), 1, None)
    await catalog.commit_turn(turn("s", 2), 1, None)
    assert await catalog.turns("s", 0, 10) == [turn("s", 1).turn, turn("s", 2).turn]
    assert await catalog.turns("s", 1, 10) == [turn("s", 2).turn]
    session = await catalog.session("s")
    assert (session.turns, session.memory, session.resting_state) == (2, MEMORY, SessionState.IDLE)
    assert await catalog.worker_state("s") == b"state 2"


async def test_a_turn_with_calls_begins_a_pause_and_the_next_turn_ends_it(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1, *CALLS), 1, None)
    session = await catalog.session("s")
    assert session.resting_state is SessionState.PAUSED
    assert [call.call for call in session.outstanding] == list(CALLS)
    await catalog.commit_turn(replace(turn("s", 2), said={"a": "r", "b": "q"}), 1, None)
    assert (await catalog.session("s")).calls == ()
    said = await catalog.call("s", "b")
    assert (said.status, said.result, said.said) == (CallStatus.COMPLETED, "q", 2)


async def test_a_repair_and_a_report_of_the_same_call_do_not_undo_each_other(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1, *CALLS), 1, None)
    before = await catalog.session("s")
    await catalog.commit_repair("s", RepairCommit(due_repairs(before)[0], b"repaired", REPAIR, MEMORY), 1)
    reported = replace(before.calls[0], status=CallStatus.FAILED, result="no", batch=1)
    await catalog.commit_call("s", reported, 1, None)
    after = await catalog.session("s")
    signal = reported.call.signal
    assert after.calls[0] == replace(reported, call_signal=signal, heard_at=after.calls[0].heard_at)
    assert (after.repairs, await catalog.worker_state("s")) == ((REPAIR,), b"repaired")
    assert [repair.position for repair in due_repairs(after)] == [1, -1]


async def test_a_repair_that_was_refused_is_done_and_leaves_the_state(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1, CALLS[0]), 1, None)
    await catalog.commit_repair("s", RepairCommit(due_repairs(await catalog.session("s"))[0]), 1)
    assert due_repairs(await catalog.session("s")) == []
    assert await catalog.worker_state("s") == b"state 1"


async def test_reports_of_repairs_belong_to_the_pause_they_happened_in(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1, *CALLS), 1, None)
    for repair in due_repairs(await catalog.session("s")):
        await catalog.commit_repair("s", RepairCommit(repair, b"", REPAIR, MEMORY), 1)
    assert len((await catalog.session("s")).repairs) == 2
    await catalog.commit_turn(turn("s", 2), 1, None)
    assert (await catalog.session("s")).repairs == ()


async def test_a_call_comes_back_as_it_was_reported(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1, *CALLS), 1, None)
    made = (await catalog.session("s")).calls[1]
    told = replace(made, started=True, arguments='{"n": 3}', pieces={0: "é", 2: "\0"}, delta_due=1)
    await catalog.commit_call("s", told, 1, None)
    found = await catalog.call("s", "b")
    assert found == replace(told, heard_at=found.heard_at)
    assert (found.partial, found.running.arguments, found.call) == ("é", '{"n": 3}', CALLS[1])
    assert found.heard_at >= made.heard_at > 0


async def test_each_kind_of_repair_marks_its_own_signal_as_used(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1, *CALLS), 1, None)
    grown = replace((await catalog.session("s")).calls[0], pieces={0: "long"}, delta_due=4)
    await catalog.commit_call("s", grown, 1, None)
    told = replace((await catalog.session("s")).calls[1], status=CallStatus.COMPLETED, result="r", batch=1)
    await catalog.commit_call("s", told, 1, None)
    seen = []
    while due := due_repairs(await catalog.session("s")):
        seen.append((due[0].trigger, due[0].position))
        await catalog.commit_repair("s", RepairCommit(due[0], b"", REPAIR, MEMORY), 1)
    on_call, on_output, on_result = RepairTrigger.TOOL_CALL, RepairTrigger.TOOL_DELTA, RepairTrigger.TOOL_RESULT
    assert seen == [(on_call, 0), (on_call, 1), (on_output, 0), (on_result, -1)]


async def test_the_last_answer_is_due_until_it_is_repaired_on(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s", repair_on=frozenset({RepairTrigger.LAST_OUTPUT})), b"", None)
    await catalog.commit_turn(turn("s", 1), 1, None)
    (due,) = due_repairs(await catalog.session("s"))
    assert due.output == 2
    await catalog.commit_repair("s", RepairCommit(due, b"", REPAIR, MEMORY), 1)
    assert due_repairs(await catalog.session("s")) == []
    await catalog.commit_turn(turn("s", 2), 1, None)
    assert len(due_repairs(await catalog.session("s"))) == 1
    await catalog.commit_turn(turn("s", 3, *CALLS), 1, None)
    assert (await catalog.session("s")).output_due == 0


async def test_the_last_repairs_are_remembered_newest_first_with_what_they_brought_back(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.create(new("other"), b"", None)
    await catalog.commit_turn(replace(turn("s", 1, *CALLS), repaired=RepairDetails("hello", (1, 2**31))), 1, None)
    (due, *_) = due_repairs(await catalog.session("s"))
    for number in range(REPAIRS_KEPT):
        details = RepairDetails(f"signal {number}", (number,))
        await catalog.commit_repair("s", RepairCommit(due, b"", REPAIR, MEMORY, details), 1)
    found = await catalog.repairs("s", 100)
    assert [record.number for record in found] == list(range(REPAIRS_KEPT + 1, 1, -1))
    assert (found[0].turn, found[0].details.signal) == (2, f"signal {REPAIRS_KEPT - 1}")
    assert (found[0].report, found[-1].details.positions) == (REPAIR, (0,))
    assert await catalog.repairs("s", 2) == found[:2]
    assert await catalog.repairs("other", 2) == []
    with pytest.raises(UnknownSession):
        await catalog.repairs("x", 2)


async def test_a_turn_s_own_repair_is_remembered_with_that_turn(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(replace(turn("s", 1), repaired=RepairDetails("hello", (1, 2**31))), 1, None)
    (record,) = await catalog.repairs("s", 9)
    assert (record.turn, record.report, record.details) == (1, REPAIR, RepairDetails("hello", (1, 2**31)))
    assert (await catalog.session("s")).repairs == ()


async def test_the_tokens_of_all_turns_come_in_their_order(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    assert await catalog.token_ids("s") == ()
    for number in (1, 2):
        await catalog.commit_turn(turn("s", number), 1, None)
    assert await catalog.token_ids("s") == (1, 2, 2**32 - 1) * 2
    with pytest.raises(UnknownSession):
        await catalog.token_ids("x")


async def test_silent_calls_are_those_that_wait_and_were_not_heard_of(catalog: SqliteCatalog) -> None:
    for id in ("s", "answered", "said"):
        await catalog.create(new(id), b"", None)
        await catalog.commit_turn(turn(id, 1, CALLS[0]), 1, None)
    call = (await catalog.session("answered")).calls[0]
    await catalog.commit_call("answered", replace(call, status=CallStatus.FAILED, result="no", batch=1), 1, None)
    await catalog.commit_turn(replace(turn("said", 2), said={"a": "r"}), 1, None)
    heard_at = (await catalog.session("s")).calls[0].heard_at
    assert await catalog.silent(heard_at) == ["s"]
    assert await catalog.silent(heard_at - 0.001) == []


async def test_who_lost_the_session_cannot_write_it(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1, *CALLS), 1, None)
    session = await catalog.session("s")
    assert await catalog.take_over("s", "w") == 2
    with pytest.raises(StaleEpoch):
        await catalog.commit_turn(turn("s", 2), 1, None)
    with pytest.raises(StaleEpoch):
        await catalog.commit_repair("s", RepairCommit(due_repairs(session)[0], b"x"), 1)
    with pytest.raises(StaleEpoch):
        await catalog.commit_call("s", replace(session.calls[0], pieces={0: "x"}), 1, None)
    assert await catalog.session("s") == replace(session, epoch=2, worker="w")
    assert await catalog.worker_state("s") == b"state 1"


async def test_a_commit_that_fails_leaves_nothing_behind(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    await catalog.commit_turn(turn("s", 1), 1, None)
    with pytest.raises(CatalogError):
        await catalog.commit_turn(turn("s", 1, *CALLS), 1, None)
    session = await catalog.session("s")
    assert (session.turns, session.calls) == (1, ())
    await catalog.commit_turn(turn("s", 2), 1, None)


async def test_what_is_unknown_is_said_to_be(catalog: SqliteCatalog) -> None:
    for attempt in (
        catalog.session("x"),
        catalog.worker_state("x"),
        catalog.take_over("x", "w"),
        catalog.delete("x", None),
        catalog.commit_turn(turn("x", 1), 1, None),
    ):
        with pytest.raises(UnknownSession):
            await attempt
    await catalog.create(new("s"), b"", None)
    with pytest.raises(UnknownCall):
        await catalog.call("s", "x")


async def test_a_deleted_session_is_gone_with_all_it_had(catalog: SqliteCatalog, tmp_path: Path) -> None:
    for id in ("s", "other"):
        await catalog.create(new(id), b"", None)
        await catalog.commit_turn(turn(id, 1, *CALLS), 1, None)
    await catalog.delete("s", None)
    assert await catalog.session_ids() == ["other"]
    with sqlite3.connect(tmp_path / "catalog.db") as file:
        for table in ("worker_states", "turns", "calls", "repairs"):
            assert {row[0] for row in file.execute(f"SELECT session FROM {table}")} == {"other"}


async def test_pages_show_every_session_once_newest_first(catalog: SqliteCatalog) -> None:
    for number in range(7):
        await catalog.create(new(f"s{number}", created=float(number // 2)), b"", None)
    seen, cursor = [], None
    while True:
        page = await catalog.page(3, cursor)
        seen += [session.id for session in page.sessions]
        cursor = page.next_cursor
        if cursor is None:
            break
        await catalog.create(new(f"late{len(seen)}", created=100.0), b"", None)
    assert seen == ["s6", "s5", "s4", "s3", "s2", "s1", "s0"]


@pytest.mark.parametrize("cursor", ["", "x", "é", "W10=", "WzEsIDJd", "WyJhIiwgImIiXQ==", "bnVsbA=="])
async def test_a_cursor_of_somebody_else_is_refused(catalog: SqliteCatalog, cursor: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await catalog.page(3, cursor)
    assert caught.value.details["field"] == "cursor"


async def test_an_answer_is_given_again_for_the_same_key_and_body_only(catalog: SqliteCatalog) -> None:
    key = IdempotencyKey("POST /x", "k", "body")
    assert await catalog.recall(key) is None
    await catalog.create(new("s"), b"", Remembered(key, "answer"))
    assert await catalog.recall(key) == "answer"
    assert await catalog.recall(replace(key, scope="POST /y")) is None
    with pytest.raises(IdempotencyConflict):
        await catalog.recall(replace(key, fingerprint="other"))


async def test_answers_are_bounded_and_the_oldest_go_first(catalog: SqliteCatalog) -> None:
    keys = [IdempotencyKey("POST /x", f"k{number}", "body") for number in range(5)]
    for number, key in enumerate(keys):
        await catalog.create(new(f"s{number}"), b"", Remembered(key, str(number)))
    assert [await catalog.recall(key) for key in keys] == [None, None, "2", "3", "4"]


async def test_a_file_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    await (await SqliteCatalog.open(path)).close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 99")
    with pytest.raises(CatalogVersion, match="version 99"):
        await SqliteCatalog.open(path)


async def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "other.db") as file:
        file.execute("CREATE TABLE mine (x)")
    with pytest.raises(CatalogError, match="another program"):
        await SqliteCatalog.open(tmp_path / "other.db")
    (tmp_path / "text").write_text("hello " * 1000)
    with pytest.raises(CatalogError, match="cannot be opened"):
        await SqliteCatalog.open(tmp_path / "text")
    with pytest.raises(CatalogError, match="cannot be opened"):
        await SqliteCatalog.open(tmp_path)
    assert (tmp_path / "text").read_text() == "hello " * 1000


async def test_a_cancelled_commit_is_there_whole_or_not_at_all(catalog: SqliteCatalog) -> None:
    await catalog.create(new("s"), b"", None)
    for number in range(1, 12):
        task = asyncio.create_task(catalog.commit_turn(turn("s", number, *CALLS), 1, None))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        session = await catalog.session("s")
        if session.turns < number:
            await catalog.commit_turn(turn("s", number, *CALLS), 1, None)
            session = await catalog.session("s")
        assert (session.turns, len(session.calls)) == (number, 2)
        assert await catalog.worker_state("s") == b"state %d" % number


WRITER = """
import asyncio, sys
from pathlib import Path
from services.catalog import TurnCommit
from services.messages import Message, ToolCall
from services.reports import MemoryReport, TurnOutcome
from services.sessions import Session, SessionSettings, Turn
from services.sqlite_catalog import SqliteCatalog

async def main():
    catalog = await SqliteCatalog.open(Path(sys.argv[1]))
    settings = SessionSettings(64, 8, "snapkv")
    await catalog.create(Session("s", 1, settings, 0.0, 0.0, 0, MemoryReport()), b"", None)
    calls = tuple(ToolCall(f"c{n}", "look", "{}") for n in range(20))
    for number in range(1, 100_000):
        outcome = TurnOutcome("s", number, Message("assistant", "x" * 5000), "tool_calls", 1, 1, MemoryReport(), (), {})
        turn = Turn("s", number, (Message("user", "y" * 5000),), (number,) * 2000, outcome)
        await catalog.commit_turn(TurnCommit(turn, str(number).encode() * 1000, calls), 1, None)
        print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("acknowledged", [1, 8, 21])
async def test_after_a_kill_every_acknowledged_turn_is_there_whole(tmp_path: Path, acknowledged: int) -> None:
    path = tmp_path / "catalog.db"
    command = (sys.executable, "-c", WRITER, str(path))
    writer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert writer.stdout is not None
    last = 0
    while last < acknowledged:
        last = int(await writer.stdout.readline())
    writer.kill()
    last = max([last, *[int(line) for line in (await writer.stdout.read()).split()]])
    await writer.wait()

    catalog = await SqliteCatalog.open(path)
    session = await catalog.session("s")
    turns = await catalog.turns("s", 0, 100_000)
    state = await catalog.worker_state("s")
    await catalog.close()
    assert session.turns in (last, last + 1)
    assert [turn.number for turn in turns] == list(range(1, session.turns + 1))
    assert turns[-1].token_ids == (session.turns,) * 2000
    assert state == str(session.turns).encode() * 1000
    assert [call.turn for call in session.calls] == [session.turns] * 20
