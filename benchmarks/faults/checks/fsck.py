"""`kvrecall fsck` of a stopped set-up, while there are sessions and after they were deleted."""

import os
import subprocess
import sys

from benchmarks.faults.rig.setups import Setup

# Consequences of damage that faults did: the rows are computed again at the next use. Every other
# complaint is a failure, whatever the faults were.
REBUILT = "computed again from the turn log"


def run_fsck(setup: Setup, damaged: bool = False) -> list[str]:
    """Complaints of fsck; with `damaged`, those about pages that are computed again do not count."""
    environment = {"KVRECALL_MODEL": str(setup.rig.model)}
    if setup.redis is not None:
        url = setup.redis.url
        environment |= {"KVRECALL_CATALOG_URL": url, "KVRECALL_STORE__REDIS_URL": url}
    complaints = []
    for folder in setup.pages:
        command = [sys.executable, "-m", "kvrecall.cli", "fsck", "--data", str(folder.parent)]
        ended = subprocess.run(
            command,
            env={**os.environ, **environment, "COLUMNS": "4000"},
            capture_output=True,
            text=True,
        )
        if ended.returncode == 0:
            continue
        lines = [line for line in ended.stdout.splitlines() if line.strip()]
        kept = [line for line in lines if REBUILT not in line] if damaged else lines
        if ended.returncode != 1 or not damaged or _problems(kept):
            complaints.append(f"{folder.parent.name}: {ended.stdout}{ended.stderr}")
    return complaints


def _problems(lines: list[str]) -> bool:
    return any(
        word in line for line in lines for word in ("do not serve", "restore a backup", "lost:")
    )
