"""Checks after faults: acknowledged turns are there, once and in order, and nothing else."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.client import FaultClient, Transcript
from benchmarks.faults.flips import page_names
from benchmarks.faults.processes import END_SECONDS, processes_under
from benchmarks.faults.scripts import Json
from benchmarks.faults.setups import Setup
from kvrecall.app.catalog import open_catalog
from kvrecall.app.errors import CannotServe
from kvrecall.domain.errors import CatalogError
from kvrecall.domain.session import Turn
from kvstore.errors import KvStoreError
from kvstore.tiers.nvme.tier import NvmeTier

ROW_FIELDS = ("length", "active_rows", "evicted_rows", "promoted_rows")
# Metrics that are 0 in a service without sessions.
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
WORKERS_METRIC = "kvrecall_worker_up"
_POLL_SECONDS = 0.2


def text_fields(answer: Json) -> Json:
    """The generated text and its lengths in an answer, without ids and times."""
    if "message" not in answer:
        return {name: answer.get(name) for name in ("type", "status", "turns", "length")}
    return {name: answer[name] for name in ("turn", "message", "finish_reason")} | {
        "tokens": answer["usage"]["output_tokens"],
        "length": answer["memory"]["length"],
    }


def row_fields(answer: Json) -> Json:
    """The state of the session's rows in an answer."""
    memory = answer.get("memory", {})
    repairs = [(each["trigger"], each["promoted"]) for each in memory.get("repairs", [])]
    return {name: memory.get(name) for name in ROW_FIELDS} | {"repairs": repairs}


@dataclass(frozen=True)
class Difference:
    """An answer that differs from the undisturbed run, in its text or else in the rows alone."""

    transcript: Transcript
    in_text: bool
    text: str


def find_differences(transcript: Transcript, undisturbed: Transcript) -> list[Difference]:
    """The answers to a script that differ from those of the undisturbed run."""
    found = []
    for step, answer, expected in zip(
        transcript.script.steps, transcript.answers, undisturbed.answers, strict=True
    ):
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
        for error in _compare_log(_read_log(setup, session), transcript, number)
    ]


def _compare_log(log: Sequence[Turn], transcript: Transcript, session: int) -> list[str]:
    numbers = [turn.number for turn in log]
    acknowledged = transcript.turns(session)
    name = transcript.name
    if numbers != list(range(1, len(acknowledged) + 1)):
        return [f"{name}: {len(acknowledged)} turns were acknowledged, the log has {numbers}"]
    errors = []
    for turn, (step, answer) in zip(log, acknowledged, strict=True):
        sent = [
            message["content"] or ""
            for message in step.body["messages"]
            if message["role"] != "tool"
        ]
        logged = [message.content for message in turn.messages if message.role != "tool"]
        reply = answer["message"] and (answer["message"]["content"] or "")
        logged_reply = turn.outcome.message and turn.outcome.message.content
        if (sent, reply) != (logged, logged_reply):
            errors.append(
                f"{name} turn {turn.number}: {sent} {reply!r} acknowledged, "
                f"{logged} {logged_reply!r} in the log"
            )
    return errors


def _read_log(setup: Setup, session: str) -> list[Turn]:
    """All turns of a session, from the catalog itself, which may be out of reach for a while.

    Raises CatalogError or CannotServe if it is out of reach for END_SECONDS.
    """

    async def read() -> list[Turn]:
        catalog = await open_catalog(setup.catalog)
        try:
            return await catalog.turns.get_after(session, 0, 1 << 20)
        finally:
            await catalog.close()

    last = time.monotonic() + END_SECONDS
    while True:
        try:
            return asyncio.run(read())
        except (CatalogError, CannotServe):
            if time.monotonic() > last:
                raise
            time.sleep(_POLL_SECONDS)


def find_changed_answers(
    client: FaultClient, transcript: Transcript, numbers: Sequence[int]
) -> list[str]:
    """Steps whose answer changes when they are sent again with their key. Raises NotServedError."""
    return [
        f"{transcript.name} step {number}"
        for number in numbers
        if client.send(transcript, number) != transcript.answers[number]
    ]


def find_leaks_in_service(setup: Setup) -> list[str]:
    """State that a service without sessions still has, END_SECONDS after its last deletion.

    Pages are collected in the background; this returns as soon as nothing is left.
    """
    last = time.monotonic() + END_SECONDS
    while (
        found := [leak for url in setup.urls for leak in _leaks_at(setup, url)]
    ) and time.monotonic() < last:
        time.sleep(_POLL_SECONDS)
    return found


def _leaks_at(setup: Setup, url: str) -> list[str]:
    metrics = setup.metrics(url)
    if not metrics:
        return [f"{url} gives no metrics"]
    # The counts of a worker that does not answer are absent: zeros of the others would prove
    # nothing.
    if (answering := metrics.get(WORKERS_METRIC, 0.0)) != len(setup.workers):
        return [f"{url}: {answering:.0f} of {len(setup.workers)} workers answer"]
    return [f"{name}: {metrics[name]:.0f}" for name in EMPTY_METRICS if metrics.get(name)]


def find_leaks_in_storage(setup: Setup) -> list[str]:
    """Pages and files that are left after all sessions were deleted and all processes stopped."""
    found = [leak for folder in setup.pages for leak in _leaks_in_files(folder)]
    if setup.redis is not None:
        with setup.redis.client() as client:
            found += [f"Redis has {name.decode()}" for name in page_names(client)]
    return found


def run_fsck(setup: Setup) -> list[str]:
    """Complaints of `kvrecall fsck` after all processes were stopped."""
    environment = {"KVRECALL_MODEL": setup.model}
    if setup.redis is not None:
        url = f"redis://127.0.0.1:{setup.redis.port}"
        environment |= {"KVRECALL_CATALOG_URL": url, "KVRECALL_STORE__REDIS_URL": url}
    complaints = []
    for folder in setup.pages:
        command = [sys.executable, "-m", "kvrecall.cli", "fsck", "--data", str(folder.parent)]
        ended = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True
        )
        if ended.returncode:
            complaints.append(f"{folder.parent.name}: {ended.stdout}{ended.stderr}")
    return complaints


def find_stray_processes(setup: Setup) -> list[str]:
    """Processes of the set-up that still run."""
    return [f"process {number} still runs" for number in processes_under(setup.folder)]


def _leaks_in_files(folder: Path) -> list[str]:
    """Pages in a tier's files, inconsistent segments, unknown files, and superfluous segments."""
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
