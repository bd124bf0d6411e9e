"""A process under a shifted clock has the file's shift at every moment, and no other change."""

import subprocess
import sys
from pathlib import Path

from faults.rig import clock

HOUR = 3600.0
WATCH = """
import sys, time
from pathlib import Path
true_time, true_time_ns, monotonic = time.time, time.time_ns, time.monotonic
from faults.rig import clock
clock.follow(Path(sys.argv[1]))
assert time.monotonic is monotonic
from grpc.aio import _utils
for line in sys.stdin:
    shifts = [time.time() - true_time(), (time.time_ns() - true_time_ns()) / 1e9]
    shifts.append(_utils._timeout_to_deadline(0) - true_time())
    print(*(round(each / 60) for each in shifts), flush=True)
"""


def test_the_clock_jumps_in_a_running_process_and_deadlines_of_calls_do_not(
    tmp_path: Path,
) -> None:
    file = tmp_path / "clock"
    clock.set_offset(file, 0.0)
    command = [sys.executable, "-c", WATCH, str(file)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for hours in (0, 5, -30, 0.5):
            clock.set_offset(file, hours * HOUR)
            process.stdin.write("\n")
            process.stdin.flush()
            minutes = str(round(hours * 60))
            assert process.stdout.readline().split() == [minutes, minutes, "0"]
        process.stdin.close()
    assert process.returncode == 0


def test_a_command_runs_under_a_shifted_clock_as_without(tmp_path: Path) -> None:
    clock.set_offset(tmp_path / "clock", HOUR)
    program = [sys.executable, *clock.PROGRAM, str(tmp_path / "clock")]
    output = subprocess.run(
        [*program, "gateway", "--help"], capture_output=True, text=True, check=True
    ).stdout
    plain = [sys.executable, "-m", "kvrecall_server.cli", "gateway", "--help"]
    expected = subprocess.run(plain, capture_output=True, text=True, check=True).stdout
    assert "kvrecall" in expected or "Usage" in expected
    assert output.splitlines()[3:] == expected.splitlines()[3:]
