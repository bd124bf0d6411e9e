"""Checks after faults: acknowledged turns are there, once and in order, and nothing else."""

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from faults.load.client import FaultClient
from faults.load.scripts import Json
from faults.load.transcript import Transcript
from faults.rig.processes import END_SECONDS
from faults.rig.setups import Setup
from kvrecall.domain.errors import CatalogError
from kvrecall.domain.sessions.session import Turn
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings

ROW_FIELDS = ("length", "active_rows", "evicted_rows", "promoted_rows")
_POLL_SECONDS = 0.2


def text_fields(answer: Json) -> Json:
    """The generated text and its lengths in an answer, without ids and times."""
    if "message" not in answer:
        return {name: answer.get(name) for name in ("type", "status", "turns")}
    return {name: answer[name] for name in ("turn", "message", "finish_reason")} | {
        "tokens": answer["usage"]["output_tokens"],
        "length": answer["memory"]["length"],
    }


def row_fields(answer: Json) -> Json:
    """The state of the session's rows in an answer.

    A fork has the rows of its session, which are others where a fault kept it from being settled.
    """
    memory = answer.get("memory", answer)
    repairs = [(each["trigger"], each["promoted"]) for each in memory.get("repairs", [])]
    return {name: memory.get(name) for name in ROW_FIELDS} | {"repairs": repairs}


@dataclass(frozen=True)
class Difference:
    """An answer that differs from the undisturbed run, in its text or else in the rows alone."""

    transcript: Transcript
    in_text: bool
    text: str


def find_differences(
    transcript: Transcript, undisturbed: Transcript, start: int = 0
) -> list[Difference]:
    """The answers from step `start` on that differ from those of the undisturbed run.

    None of a script with episodes.
    """
    found: list[Difference] = []
    if transcript.script.episodes:
        return found
    steps = list(zip(transcript.script.steps, transcript.answers, strict=False))
    for (step, answer), expected in list(zip(steps, undisturbed.answers, strict=False))[start:]:
        for get_fields in (text_fields, row_fields):
            ours = get_fields(answer)
            theirs = get_fields(expected)
            if ours != theirs:
                text = f"{transcript.name} {step.kind}: {ours}, undisturbed {theirs}"
                found.append(Difference(transcript, get_fields is text_fields, text))
                break
    return found


def find_log_errors(setup: Setup, transcript: Transcript) -> list[str]:
    """Differences of the turn logs of a script's sessions from the acknowledged turns."""
    return [
        error
        for number, session in transcript.sessions.items()
        for error in compare_log(read_log(setup, session), transcript, number)
    ]


def compare_log(log: Sequence[Turn], transcript: Transcript, session: int) -> list[str]:
    """Differences of a turn log from the acknowledged turns of one session.

    An aborted turn may have been committed before its end, once.
    """
    aborted = transcript.aborted(session)
    expected = [turn for turn in log if turn.messages[-1:] and turn.messages[-1].content in aborted]
    name = f"{transcript.name} session {session}"
    texts = [turn.messages[-1].content for turn in expected]
    if len(set(texts)) != len(texts) or (texts and not transcript.voided):
        return [f"{name}: aborted turns in the log: {texts}"]
    numbers = [turn.number for turn in log]
    acknowledged = transcript.turns_with_results(session)
    if numbers != list(range(1, len(acknowledged) + len(texts) + 1)):
        return [f"{name}: {len(acknowledged)} turns were acknowledged, the log has {numbers}"]
    errors = []
    kept = [turn for turn in log if turn not in expected]
    for turn, (step, answer, results) in zip(kept, acknowledged, strict=True):
        sent = [
            *results,
            *(message["content"] or "" for message in step.body["messages"]),
        ]
        logged = [message.content for message in turn.messages]
        reply = answer["message"] and (answer["message"]["content"] or "")
        logged_reply = turn.outcome.message and turn.outcome.message.content
        if (sent, reply) != (logged, logged_reply):
            errors.append(
                f"{name} turn {turn.number}: {sent} {reply!r} acknowledged, "
                f"{logged} {logged_reply!r} in the log"
            )
    return errors


def read_log(setup: Setup, session: str) -> list[Turn]:
    """All turns of a session, from the catalog itself, which may be out of reach for a while.

    Raises CatalogError or CannotServe if it is out of reach for END_SECONDS.
    """

    async def read() -> list[Turn]:
        with tempfile.TemporaryDirectory() as folder:
            catalog = await open_catalog(copy_catalog(setup.catalog, Path(folder)))
            try:
                return await catalog.turns.get_after(session, 0, 1 << 20)
            finally:
                await catalog.close()

    last = time.monotonic() + END_SECONDS
    while True:
        try:
            return asyncio.run(read())
        except (CatalogError, CannotServe, sqlite3.Error):
            if time.monotonic() > last:
                raise
            time.sleep(_POLL_SECONDS)


def copy_catalog(settings: Settings, folder: Path) -> Settings:
    """Copy a catalog's file to `folder`, as a gateway has locked it; one in Redis is read itself."""
    if settings.catalog_url is not None:
        return settings
    source = f"file:{settings.data / 'catalog.sqlite3'}?mode=ro"
    with (
        closing(sqlite3.connect(source, uri=True)) as file,
        closing(sqlite3.connect(folder / "catalog.sqlite3")) as copy,
    ):
        file.backup(copy)
    return settings.model_copy(update={"data": folder})


def find_changed_answers(
    client: FaultClient, transcript: Transcript, numbers: Sequence[int]
) -> list[str]:
    """Steps whose answer changes when they are sent again with their key. Raises NotServedError."""
    repeatable = [
        number
        for number in numbers
        if transcript.script.steps[number].kind not in ("abort", "move")
    ]
    return [
        f"{transcript.name} step {number}"
        for number in repeatable
        if client.send(transcript, number) != transcript.answers[number]
    ]
