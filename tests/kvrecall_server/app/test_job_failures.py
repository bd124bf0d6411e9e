"""What a worker logs of a job that fails: where it was, and nothing that the job was about."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.servers import DEADLINE_SECONDS

WORD = "quartz"
# A worker that fails three jobs: in a pass for a repair, in one for two sessions at once, and in a
# call that is no job. The log is set up as the first argument says, or not at all.
FAILURES = """
import asyncio, sys
from pathlib import Path

import torch
from safetensors.torch import save

from kvrecall_server.app.local.worker import LocalWorkerClient
from kvrecall_server.app.logs import set_up_logs
from kvrecall_server.app.wiring import build_worker_service
from kvrecall.domain.errors import WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as pb
from reference import MODEL_PATH
from workers.cache.forward_step import ForwardStep
from workers.engine.session_state import STATE_VERSION
from workers.engine.settings import WorkerSettings

TEXT = "zebra quartz falconry " * 9
SAID = [pb.Message(role="user", content=TEXT)]
update = ForwardStep.update


def fail_together(step, *arguments, **named):
    if len(step.slot_list) > 1:
        raise ValueError(f"cannot decode {TEXT}")
    return update(step, *arguments, **named)


async def speak(worker, session):
    spec = pb.SessionSpec(
        session=session, epoch=1, method="snapkv", budget=64, repair_rows=8, layer_budgets="uniform"
    )
    await worker.open(pb.OpenRequest(spec=spec))
    request = pb.TurnRequest(session=session, epoch=1, messages=SAID, generate=True)
    request.sampling.max_tokens = 40
    request.sampling.min_tokens = 40
    return [event async for event in worker.turn(request)]


async def fail(worker):
    ForwardStep.update = fail_together
    await asyncio.gather(speak(worker, "s"), speak(worker, "t"))
    wrong = pb.RepairRequest(session="s", epoch=1, trigger="turn", text=TEXT, token_ids=[10**6])
    selection = save({"positions.0": torch.zeros(1), TEXT: torch.zeros(1)})
    broken = pb.SessionState(length=5, selection=selection, state_version=STATE_VERSION)
    rows = pb.MapRowsRequest(state=broken, stop=5, columns=1)
    for call in (worker.repair(wrong), worker.map_rows(rows)):
        try:
            await call
        except WorkerRefused:
            continue
        raise SystemExit("it did not fail")


async def main(form, data):
    if form != "none":
        set_up_logs(form, "debug")
    settings = WorkerSettings(max_budget=256, native_attention=False)  # its steps update nothing
    service = build_worker_service(MODEL_PATH, data, settings, ram_bytes=1 << 24)
    worker = LocalWorkerClient(service)
    try:
        await fail(worker)
    finally:
        await worker.close()


asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.mark.parametrize("form", ["none", "console", "json"])
def test_a_failed_job_is_logged_without_variables_and_texts(form: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FAILURES, form, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    logged = run.stdout + run.stderr
    assert run.returncode == 0, logged
    for event in ("joint forward pass failed", "job failed", "call failed"):
        assert event in logged
    for kind in ("ValueError", "IndexError"):
        assert kind in logged
    assert "embedding" in logged, "the frames are there"
    assert WORD not in logged
