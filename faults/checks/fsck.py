"""`kvrecall fsck` of a stopped set-up, while there are sessions and after they were deleted."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from faults.rig.setups import KEYS_FILE, Setup
from faults.rig.zygote import COMMAND_LINE

# Consequences of damage that faults did: the rows are computed again at the next use. Every other
# complaint is a failure, whatever the faults were.
FOUND_PROBLEMS = 1
REBUILT = "computed again from the turn log"


def run_fsck(setup: Setup, damaged: bool = False) -> list[str]:
    """Complaints of fsck; with `damaged`, those about pages that are computed again do not count."""
    environment = {"KVRECALL_MODEL": str(setup.rig.model), "COLUMNS": "4000"}
    if setup.rig.ranks > 1:
        environment["KVRECALL_TENSOR_PARALLEL"] = str(setup.rig.ranks)
    if setup.redis is not None:
        url = setup.redis.url
        environment |= {"KVRECALL_CATALOG_URL": url, "KVRECALL_STORE__REDIS_URL": url}
    if (keys := setup.catalog.encryption.keys_file) is not None:
        environment[KEYS_FILE] = str(keys)
    complaints = []
    for server in setup.workers:
        data = setup.data / server.name
        code, output = _run(setup, ["fsck", "--data", str(data)], environment)
        if code == 0:
            continue
        lines = [line for line in output.splitlines() if line.strip()]
        kept = [line for line in lines if REBUILT not in line] if damaged else lines
        if code != FOUND_PROBLEMS or not damaged or _problems(kept):
            complaints.append(f"{server.name}: {output}")
    return complaints


def _run(setup: Setup, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output of a kvrecall command."""
    if setup.rig.zygote is None:
        command = [sys.executable, "-m", "kvrecall_server.cli", *arguments]
        ended = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True
        )
        return ended.returncode, ended.stdout + ended.stderr
    errors = setup.folder / "command.log"
    with errors.open("wb") as log:
        process = setup.rig.zygote.spawn(
            COMMAND_LINE, arguments, {**os.environ, **environment}, log.fileno()
        )
    with process:
        output = process.stdout.read().decode()
        return process.wait(), output + errors.read_text(encoding="utf-8", errors="replace")


def _problems(lines: list[str]) -> bool:
    return any(
        word in line for line in lines for word in ("do not serve", "restore a backup", "lost:")
    )
