"""Grammars of clients are compiled in processes that can be ended, one of a tenant at a time."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher

from kvrecall.sandbox import child
from kvrecall.sandbox.process import Vocabulary
from kvrecall.sandbox.sandbox import GrammarSandbox
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall.sandbox.verdict import SandboxBusy

LETTERS = "abcdefghijklmnopqrstuvwxyz"
# The time that compiling takes doubles with each pattern: these take 129 s and 2.3 GB without limits.
PATTERNS = 20


def write_schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def write_bomb(first: int = 0, patterns: int = PATTERNS) -> str:
    letters = (LETTERS * 2)[first : first + patterns]
    return write_schema(
        {"type": "string", "allOf": [{"pattern": f".*{letter}.*"} for letter in letters]}
    )


PLAIN = write_schema({"type": "object"})


class Harness:
    """A sandbox that counts what it charges."""

    def __init__(self, vocabulary: Vocabulary | None = None, **settings: Any) -> None:
        self.charged: list[float] = []
        # Tests run beside others: what they are about is CPU time, not the machine's.
        chosen = {"seconds": 60.0, "waiting_seconds": 60.0} | settings
        self.sandbox = GrammarSandbox(
            SandboxSettings(**chosen),
            vocabulary=vocabulary,
            charge=self.charged.append,
        )


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.sandbox.close()


def find_children() -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process().children()
        if any(part.endswith("sandbox/child.py") for part in each.cmdline())
    ]


def test_a_grammar_that_takes_minutes_is_refused_after_a_second_of_cpu_time() -> None:
    """With more memory than it takes in a second of the fastest machine."""
    large = Harness(memory_bytes=2 << 30)
    try:
        verdict = large.sandbox.compile(write_bomb(), "mallory")
        assert verdict.exhausted
        assert verdict.problem == "it is too complex: it takes over 1 s to compile"
        assert 0.5 < verdict.cpu_seconds < 2.0
        assert large.charged == [verdict.cpu_seconds]
    finally:
        large.sandbox.close()


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    small = Harness(memory_bytes=16 << 20, cpu_seconds=60)
    verdict = small.sandbox.compile(write_bomb(patterns=17))
    assert verdict.exhausted
    assert "over 16 MiB" in verdict.problem
    assert small.sandbox.compile(PLAIN).problem == "", "the next one is compiled as ever"
    small.sandbox.close()


def test_a_refusal_is_known_the_next_time(harness: Harness) -> None:
    first = harness.sandbox.compile(write_bomb(), "mallory")
    again = harness.sandbox.compile(write_bomb(), "ann")
    assert again.problem == first.problem
    assert again.cpu_seconds == 0.0
    assert len(harness.charged) == 1


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than `select` can wait for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_grammars_are_compiled_beside_a_thousand_open_files(harness: Harness) -> None:
    assert harness.sandbox.compile(PLAIN).problem == ""


def test_a_process_that_could_not_be_set_up_is_replaced() -> None:
    failures = [ValueError("no vocabulary")]

    def build() -> dict[str, Any]:
        if failures:
            raise failures.pop()
        return {}

    others = find_children()
    harness = Harness(build, processes=1)
    with pytest.raises(ValueError, match="no vocabulary"):
        harness.sandbox.compile(PLAIN)
    assert find_children() == others
    assert harness.sandbox.compile(PLAIN).problem == ""
    harness.sandbox.close()


@pytest.mark.parametrize("text", ["x" * 1025, "ü" * 513])
def test_a_grammar_that_is_too_large_reaches_no_process(text: str) -> None:
    harness = Harness(grammar_bytes=1024)
    verdict = harness.sandbox.compile(text)
    assert verdict.exhausted
    assert "1024 bytes" in verdict.problem
    assert harness.charged == []


def test_a_tenants_grammars_keep_another_waiting_for_none() -> None:
    harness = Harness(max_waiting=4)
    bombs = [harness.sandbox.submit(write_bomb(first), "mallory") for first in range(4)]
    assert harness.sandbox.compile(PLAIN, "ann").problem == ""
    assert sum(bomb.done() for bomb in bombs) <= 1, "mallory's took one process, and turns in it"
    for bomb in bombs:
        bomb.cancel()
    harness.sandbox.close()


def test_as_many_wait_as_may_and_the_rest_is_refused() -> None:
    harness = Harness(max_waiting=1)
    refusals = []
    for first in range(5):
        try:
            harness.sandbox.submit(write_bomb(first), "mallory")
        except SandboxBusy as error:
            refusals.append(str(error))
    assert len(refusals) >= 3, "one runs and one waits"
    assert all("the limit" in refusal for refusal in refusals)
    harness.sandbox.close()


def test_waiting_has_a_limit() -> None:
    harness = Harness(waiting_seconds=0.01, processes=1)
    first = harness.sandbox.submit(write_bomb(), "mallory")
    with pytest.raises(SandboxBusy, match="not compiled within"):
        harness.sandbox.compile(PLAIN, "ann")
    first.cancel()
    harness.sandbox.close()


def test_a_panic_of_the_compiler_is_not_told() -> None:
    panic = (
        "panic: assertion failed: grammar.symbols.len() < u16::MAX\n<backtrace>\n  0: rust_begin"
    )
    assert child.tidy(panic) == "it is too large"
    assert child.tidy("no such rule: x\n<non-verbose/>\n") == "no such rule: x"
    assert child.tidy("unknown name: panic") == "unknown name: panic"
    assert child.tidy("") == ""


def test_a_process_that_is_killed_is_replaced(harness: Harness) -> None:
    assert harness.sandbox.compile(PLAIN).problem == ""
    before = find_children()
    assert before
    for process in before:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    grammars = (write_schema({"type": "object", "title": str(title)}) for title in range(9))
    outcomes = []
    for grammar in grammars:
        try:
            outcomes.append(harness.sandbox.compile(grammar).problem)
        except SandboxBusy as error:
            outcomes.append(str(error))
    assert outcomes[-1] == ""
    assert len([outcome for outcome in outcomes if outcome]) <= len(before)


def test_no_process_is_left_when_it_is_closed() -> None:
    harness = Harness()
    waiting = harness.sandbox.submit(write_bomb())
    harness.sandbox.compile(PLAIN, "ann")
    assert find_children()
    harness.sandbox.close()
    assert not find_children()
    assert waiting.done()
