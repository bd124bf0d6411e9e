"""What the coding agents are asked: scenarios that end with the text that has to be printed."""

import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.clients.server import ScriptedServer
from tests.clients.workplace import Outcome, Workplace

_BOUND_SECONDS = 60
_POLL_SECONDS = 0.05
# Tools' results, which agents drop first: more than what they keep as it was, 20,000 tokens or so.
_LONG_FILES = 6
_LONG_LINES = 400
# The free part of a context that is nearly full, of what is used.
_ROOM = 0.1


class Failed(Exception):
    """A scenario did not end as it has to."""


@dataclass(frozen=True)
class Stage:
    """An agent and its server in one scenario."""

    agent: Workplace
    server: ScriptedServer


Scenario = Callable[[Stage], None]


def plain(stage: Stage) -> None:
    """One question and its answer."""
    _require(stage.agent.ask("My name is Ada. What is my name?"), "Your name is Ada.")


def turns(stage: Stage) -> None:
    """A conversation of three turns, each a run of the agent."""
    _require(stage.agent.ask("My name is Ada."))
    _require(stage.agent.go_on("The sky is blue."))
    _require_cached(stage, lambda: stage.agent.go_on("What is my name?"))


def tool(stage: Stage) -> None:
    """A command of the shell, whose output the model reads."""
    _require(stage.agent.ask("Please run [cat note.txt]."), "The results are:", "K4821")


def parallel(stage: Stage) -> None:
    """Two commands in one answer.

    They take a second: Qwen Code 0.24 may lose the output of one that ends at once beside another.
    """
    commands = "[cat note.txt; sleep 1] and [cat other.txt; sleep 1]"
    done = stage.agent.ask(f"Please run {commands}.")
    _require(done, "The results are:", "K4821", "M77é😀")


def failing_tool(stage: Stage) -> None:
    """A command that fails: the model reads why."""
    _require(stage.agent.ask("Please run [cat missing.txt]."), "The results are:", "No such file")


def image(stage: Stage) -> None:
    """An image that a tool shows, and the next turn of that conversation."""
    _require(stage.agent.ask("My name is Ada. Please look at [picture.png]."), "The results are:")
    if stage.agent.continues:
        _require(stage.agent.go_on("What is my name?"), "Your name is Ada.")


def resume(stage: Stage) -> None:
    """An old conversation by its id, after another one."""
    _require(stage.agent.ask("My name is Ada."))
    first = stage.agent.find_conversations()
    if len(first) != 1:
        raise Failed(f"{len(first)} conversations are stored after the first; expected 1")
    _require(stage.agent.ask("My name is Bob."))
    _require_cached(stage, lambda: stage.agent.resume(first.pop(), "What is my name?"))


def cancel(stage: Stage) -> None:
    """Ctrl-C while the model answers, and the next turn."""
    _require(stage.agent.ask("My name is Ada."))
    stage.server.hold()
    worker = stage.server.worker
    stage.agent.interrupt("Tell me a story.", lambda: _wait_for(worker.reached["token"].is_set))
    _wait_for(lambda: worker.open_turns == 0)
    stage.server.release()
    _require(stage.agent.go_on("What is my name?"), "Your name is Ada.")


def compaction(stage: Stage) -> None:
    """A conversation that outgrows the context: the agent compacts it and goes on by itself.

    An agent that is told of the context is asked something short, where the context is nearly full;
    all others something that does not fit in it any more.
    """
    _require(stage.agent.ask("My name is Ada."))
    files = " and ".join(f"[cat long{number}.txt]" for number in range(_LONG_FILES))
    _require(stage.agent.go_on(f"Please run {files}."), "The results are:")
    worker = stage.server.worker
    length = max(state.length for state in worker.sessions.values())
    room = int(length * _ROOM)
    worker.context = length + room
    asked = "What is my name?"
    if not stage.agent.set_context(worker.context):
        asked += " Tell me again." * (room // 3 + 1)
    before = len(stage.server.exchanges)
    done = stage.agent.go_on(asked)
    if "Your name is Ada." not in done.text:  # opencode goes on, but has the exit code 1
        raise Failed(f"exit code {done.code}: {done.text[-300:]!r} {done.log[-300:]!r}")
    if len(stage.server.exchanges) < before + 2:
        raise Failed("it asked for no summary")


def subagent(stage: Stage) -> None:
    """A subagent, whose answer the model reads."""
    done = stage.agent.ask("Please delegate [My name is Ada. What is my name?].")
    _require(done, "The results are:", "Your name is Ada.")


SCENARIOS: dict[str, Scenario] = {
    "plain": plain,
    "turns": turns,
    "tool": tool,
    "parallel calls": parallel,
    "failing tool": failing_tool,
    "image": image,
    "resume": resume,
    "cancel": cancel,
    "compaction": compaction,
    "subagent": subagent,
}


def make_files() -> dict[str, bytes]:
    """Make the files that scenarios read: short and long texts, and a picture of one red point."""
    long = b"It rained again and again, and then again and again.\n" * _LONG_LINES
    return {
        "note.txt": b"The badge is K4821.\n",
        "other.txt": "The other badge is M77é😀.\n".encode(),
        "picture.png": _make_picture(),
        **{f"long{number}.txt": long for number in range(_LONG_FILES)},
    }


def _make_picture() -> bytes:
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"\x00\xff\x00\x00")),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _require(done: Outcome, *texts: str) -> None:
    """Require the exit code 0 and the texts in what the agent printed. Raises Failed."""
    if done.code != 0:
        raise Failed(f"exit code {done.code}: {(done.text + done.log)[-300:]}")
    missing = [text for text in texts if text not in done.text]
    if missing:
        raise Failed(f"did not print {missing[0]!r}, but {done.text[-300:]!r}; {done.log[-300:]!r}")


def _require_cached(stage: Stage, run: Callable[[], Outcome]) -> None:
    """Require the name, and that what was said before was not computed again. Raises Failed."""
    before = len(stage.server.exchanges)
    _require(run(), "Your name is Ada.")
    new = stage.server.exchanges[before:]
    # Not every agent asks for its usage, with the tokens that were cached.
    if not any(each.cached_tokens or each.match in ("continued", "forked") for each in new):
        raise Failed(f"nothing was cached: {', '.join(map(str, new))}")


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + _BOUND_SECONDS
    while not condition():
        if time.monotonic() > until:
            raise Failed("waited in vain")
        time.sleep(_POLL_SECONDS)
