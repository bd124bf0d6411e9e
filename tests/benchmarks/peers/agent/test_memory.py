"""Peak memory: of the whole tree, and of what was given back, too."""

import subprocess
import sys

from benchmarks.peers.agent.memory import peak_bytes, read_peak

MEBIBYTE = 1 << 20
# Holds 100 MiB for a moment, starts a child that holds 50 MiB, says so, and waits.
PROGRAM = """
import subprocess, sys
if len(sys.argv) == 1:
    block = bytearray(b"x") * (100 << 20)
    del block
    child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE)
    child.stdout.readline()
else:
    block = bytearray(b"x") * (50 << 20)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_peaks_of_a_process_and_its_children_are_added_up(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    pipe = subprocess.PIPE
    command = [sys.executable, str(program)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 150 * MEBIBYTE < peak_bytes(process.pid) < 250 * MEBIBYTE
        assert process.stdin is not None
        process.stdin.write("\n")


def test_the_peak_is_in_bytes() -> None:
    assert read_peak("Name:\tx\nVmPeak:\t  9 kB\nVmHWM:\t  3 kB\n") == 3072
    assert read_peak("Name:\tx\nState:\tZ (zombie)\n") == 0
