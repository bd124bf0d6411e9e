"""What must hold after faults: whatever was acknowledged is there, once and in order, and nothing is left over."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.flips import page_names
from benchmarks.faults.processes import processes_under
from benchmarks.faults.scripts import Json
from benchmarks.faults.setups import Setup
from benchmarks.faults.speaking import FaultClient, Told
from kvrecall.app.catalog import open_catalog
from kvrecall.app.errors import CannotServe
from kvrecall.domain.errors import CatalogError
from kvrecall.domain.session import Turn
from kvstore.errors import KvStoreError
from kvstore.tiers.nvme.tier import NvmeTier

ROWS = ("length", "active_rows", "evicted_rows", "promoted_rows")
SETTLE_SECONDS = 60.0
EMPTY_METRICS = (
    "kvrecall_slots_in_use",
    "kvrecall_worker_sessions",
    "kvrecall_worker_queued",
    "kvrecall_turns_running",
    "kvrecall_turns_waiting",
    "kvrecall_tier_bytes nvme",
    "kvrecall_tier_bytes redis",
    "kvrecall_tier_bytes ram",
)
"""What is 0 in a service without sessions."""


def said(answer: Json) -> Json:
    """What an answer says, without ids and times."""
    if "message" not in answer:
        return {name: answer.get(name) for name in ("type", "status", "turns", "length")}
    return {name: answer[name] for name in ("turn", "message", "finish_reason")} | {
        "tokens": answer["usage"]["output_tokens"],
        "length": answer["memory"]["length"],
    }


def held(answer: Json) -> Json:
    """What an answer says of the session's rows."""
    memory = answer.get("memory", {})
    repairs = [(each["trigger"], each["promoted"]) for each in memory.get("repairs", [])]
    return {name: memory.get(name) for name in ROWS} | {"repairs": repairs}


@dataclass(frozen=True)
class Difference:
    """An answer that is not that of the undisturbed run: in what was said, or else only in which rows were held."""

    told: Told
    in_words: bool
    text: str


def differences(told: Told, calm: Told) -> list[Difference]:
    """Where the answers to a script are not those of the undisturbed run."""
    found = []
    for step, answer, expected in zip(told.script.steps, told.answers, calm.answers, strict=True):
        for look in (said, held):
            if look(answer) != look(expected):
                text = f"{told.name} {step.kind}: {look(answer)}, undisturbed {look(expected)}"
                found.append(Difference(told, look is said, text))
                break
    return found


def missing_from_log(setup: Setup, told: Told) -> list[str]:
    """What is wrong with the turn logs of a script's sessions, against what was acknowledged."""
    return [
        wrong
        for who in told.sessions
        for wrong in _compare_log(_log(setup, told.sessions[who]), told, who)
    ]


def _compare_log(log: Sequence[Turn], told: Told, who: int) -> list[str]:
    numbers = [turn.number for turn in log]
    acknowledged = told.turns_of(who)
    if numbers != list(range(1, len(acknowledged) + 1)):
        return [f"{told.name}: {len(acknowledged)} turns were acknowledged, the log has {numbers}"]
    wrong = []
    for turn, (step, answer) in zip(log, acknowledged, strict=True):
        sent = [
            message["content"] or ""
            for message in step.body["messages"]
            if message["role"] != "tool"
        ]
        logged = [message.content for message in turn.messages if message.role != "tool"]
        message = answer["message"] and (answer["message"]["content"] or "")
        kept = turn.outcome.message and turn.outcome.message.content
        if (sent, message) != (logged, kept):
            wrong.append(
                f"{told.name} turn {turn.number}: {sent} {message!r} acknowledged, {logged} {kept!r} in the log"
            )
    return wrong


def _log(setup: Setup, session: str) -> list[Turn]:
    """All turns of a session, from the catalog itself. The catalog may be out of reach for a while."""

    async def read() -> list[Turn]:
        catalog = await open_catalog(setup.catalog)
        try:
            return await catalog.turns.get_after(session, 0, 1 << 20)
        finally:
            await catalog.close()

    last = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            return asyncio.run(read())
        except (CatalogError, CannotServe):
            if time.monotonic() > last:
                raise
            time.sleep(0.2)


def changed_when_asked_again(speaker: FaultClient, told: Told, numbers: Sequence[int]) -> list[str]:
    """The steps whose answer is another one when they are sent again with their key."""
    return [
        f"{told.name} step {number}"
        for number in numbers
        if speaker.take(told, number) != told.answers[number]
    ]


def leaks_in_service(setup: Setup) -> list[str]:
    """What a service that has no sessions any more still holds, once it has come to rest."""
    last = time.monotonic() + SETTLE_SECONDS
    while (
        found := [leak for url in setup.urls for leak in _held_by(setup, url)]
    ) and time.monotonic() < last:
        time.sleep(0.2)
    return found


def _held_by(setup: Setup, url: str) -> list[str]:
    metrics = setup.metrics(url)
    if not metrics:
        return [f"{url} gives no metrics"]
    return [f"{name}: {metrics[name]:.0f}" for name in EMPTY_METRICS if metrics.get(name)]


def leaks_in_storage(setup: Setup) -> list[str]:
    """Pages, files and processes that are there though every session was deleted and everything was stopped."""
    found = [leak for folder in setup.pages for leak in _left_in_files(folder)]
    if setup.redis is not None:
        with setup.redis.client() as client:
            found += [f"Redis has {name.decode()}" for name in page_names(client)]
    return found


def found_by_fsck(setup: Setup) -> list[str]:
    """What `kvrecall fsck` complains of, once everything was stopped."""
    environment = {"KVRECALL_MODEL": setup.model}
    if setup.redis is not None:
        url = f"redis://127.0.0.1:{setup.redis.port}"
        environment |= {"KVRECALL_CATALOG_URL": url, "KVRECALL_STORE__REDIS_URL": url}
    wrong = []
    for folder in setup.pages:
        command = [sys.executable, "-m", "kvrecall.cli", "fsck", "--data", str(folder.parent)]
        ended = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True
        )
        if ended.returncode:
            wrong.append(f"{folder.parent.name}: {ended.stdout}{ended.stderr}")
    return wrong


def strays(setup: Setup) -> list[str]:
    """Processes of the set-up that still run."""
    return [f"process {number} still runs" for number in processes_under(setup.folder)]


def _left_in_files(folder: Path) -> list[str]:
    """Pages that the tier finds, books that do not agree, unknown files, and segments that nobody needs."""
    known = {"lock"}
    found = [
        f"{path.name} in {folder.parent.name}"
        for path in folder.iterdir()
        if path.name not in known and not path.match("segment-*.kv")
    ]
    try:
        with closing(NvmeTier(folder)) as tier:
            tier.check()
            found += [f"page {header.key} in {folder.parent.name}" for header in tier.stored()]
    except KvStoreError as error:
        found.append(f"{folder.parent.name}: {error}")
    segments = sorted(folder.glob("segment-*.kv"))
    return found + [
        f"{path.name} of {path.stat().st_size} bytes in {folder.parent.name}"
        for path in segments[:-1]
    ]
