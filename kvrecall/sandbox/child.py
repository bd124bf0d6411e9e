"""Program of a process that compiles grammars: each in a fork of its own, with limits, and reaped.

It is started by its path, without the package around it, so that it is small and has one thread:
only such a process may fork. A fork begins with llguidance and the vocabulary loaded, in
milliseconds; what it allocates ends with it, and so does a crash of it.

Frames in both directions: four bytes of length (big endian), then JSON. The first frame in is the
set-up, each other one is the text of a grammar; each frame out is its outcome.
"""

import json
import os
import resource
import select
import signal
import struct
import sys
from typing import IO, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_LENGTH = struct.Struct("!I")
_MOST_TEXT = 300
# Turns come first: beside one busy thread on a core this process gets a tenth of it.
_NICENESS = 10


def read_frame(stream: IO[bytes]) -> Any:
    """Read one frame's value; None at the stream's end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return json.loads(body) if len(body) == length else None


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Write a value as one frame."""
    body = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def build_parser_limits() -> LLParserLimits:
    """Build the limits that a grammar is compiled and followed with, here and in a worker.

    Less than llguidance's own where they bound a step of an answer, since all sessions of a worker
    wait for it: some 6 ms instead of 25. More items in a row: an object of 600 properties has 2,400.
    An error with the parser's state would show the client's schema in logs.
    """
    return LLParserLimits(
        max_items_in_row=10_000,
        step_lexer_fuel=50_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def find_problem(grammar: str, vocabulary: LLTokenizer | None) -> str:
    """Compile a grammar, up to its first step if there is a vocabulary. Returns llguidance's error."""
    limits = build_parser_limits()
    if vocabulary is None:
        return LLMatcher.validate_grammar(grammar, limits=limits)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def tidy(problem: str) -> str:
    """Return an error on one line, without the parser's state; empty for none.

    A panic is an assertion of the compiler that a large grammar breaks: its text is for developers.
    """
    if problem.startswith("panic"):
        return "it is too large"
    return " ".join(problem.split("<non-verbose/>")[0].split())[:_MOST_TEXT]


def main() -> None:
    """Compile grammars until the stream ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = read_frame(requests)
    if setup is None:
        return
    os.nice(_NICENESS)
    vocabulary = LLTokenizer(**setup["vocabulary"]) if setup["vocabulary"] else None
    write_frame(answers, "ready")
    while (grammar := read_frame(requests)) is not None:
        write_frame(answers, _run(grammar, vocabulary, setup))


def _run(grammar: str, vocabulary: LLTokenizer | None, setup: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar in a fork. Returns what it said, how it ended, and what it took."""
    before = _measure_memory()[1]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _compile(grammar, vocabulary, setup, writing)
    os.close(writing)
    said = _read_until(reading, setup["seconds"])
    if said is None:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status, usage = os.wait4(child, 0)
    return {
        "problem": None if said is None else said.decode(errors="replace"),
        "late": said is None,
        "complete": os.waitstatus_to_exitcode(status) == 0,
        "out_of_time": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "memory_bytes": max(0, usage.ru_maxrss * 1024 - before),
    }


def _compile(
    grammar: str, vocabulary: LLTokenizer | None, setup: dict[str, Any], writing: int
) -> None:
    """Be the fork: compile under limits, say what is wrong, and end."""
    status = 1
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # the parent's frames are not the fork's, nor is its log
            os.dup2(nowhere, stream)
        _limit(setup["cpu_seconds"], setup["memory_bytes"])
        try:
            problem = find_problem(grammar, vocabulary)
        except ValueError as error:
            problem = str(error)
        os.write(writing, tidy(problem).encode())
        status = 0
    finally:
        os._exit(status)


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit what this process may take from now on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    if sys.platform == "linux":  # elsewhere the system maps far more than a process uses
        mapped, _ = _measure_memory()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes,) * 2)


def _measure_memory() -> tuple[int, int]:
    """Return the bytes of this process that are mapped, and those in memory; 0 where unknown."""
    if sys.platform != "linux":
        return 0, 0
    with open("/proc/self/statm") as sizes:
        mapped, resident = (
            int(pages) * resource.getpagesize() for pages in sizes.read().split()[:2]
        )
    return mapped, resident


def _read_until(source: int, seconds: float) -> bytes | None:
    """Read a pipe to its end; None if it does not end within so many seconds."""
    said = b""
    while select.select([source], [], [], seconds)[0]:
        piece = os.read(source, 4096)
        if not piece:
            return said
        said += piece
    return None


if __name__ == "__main__":
    main()
