"""A rank lives as long as the launcher that has started it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.servers import DEADLINE_SECONDS

# Looks for its launcher, and would go on for longer than the next look takes.
RANK = """
import time
from kvrecall_server.app.ranks.launch import end_with_launcher
end_with_launcher()
time.sleep(2)
"""


def run_rank(run_id: str) -> int:
    """Run a rank of this process, as part of a launcher's run; its status."""
    environment = os.environ | {"TORCHELASTIC_RUN_ID": run_id}
    command = [sys.executable, "-c", RANK]
    return subprocess.run(command, env=environment, timeout=DEADLINE_SECONDS).returncode


def test_a_rank_whose_launcher_was_killed_before_it_looked_ends() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert run_rank(f"kvrecall-{ended.pid}") == -signal.SIGTERM


@pytest.mark.parametrize("run_id", [f"kvrecall-{os.getpid()}", "none"], ids=["ours", "torchrun"])
def test_a_rank_goes_on_while_its_launcher_is_there(run_id: str) -> None:
    assert run_rank(run_id) == 0
