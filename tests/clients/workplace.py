"""A coding agent in a HOME and a folder of its own, run as a person would without a terminal."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environments import Agent
from tests.clients.server import MODEL

HERE = Path(__file__).parent
SETTINGS = HERE / "agents"
# What the settings of the documentation name.
_ADDRESS = "http://127.0.0.1:8420"
_DOCUMENTED_MODEL = "smollm2"
_DOCUMENTED_CONTEXT = "8192"
# How long a person waits after Ctrl-C before the next one.
_PATIENCE_SECONDS = 15


@dataclass(frozen=True)
class Outcome:
    """What a run of an agent left: its exit code, and what it printed on both outputs."""

    code: int
    text: str
    log: str


class Workplace:
    """HOME and folder of an agent, with its settings for a server.

    `files` (name to content) are put into the folder. A run that takes longer than `seconds` is
    killed with all that it started, and raises TimeoutExpired.
    """

    def __init__(
        self,
        agent: Agent,
        binaries: Sequence[Path],
        folder: Path,
        url: str,
        context: int,
        seconds: float,
        files: Mapping[str, bytes],
    ) -> None:
        self._agent = agent
        self._url = url
        self._seconds = seconds
        self._home = folder / "home"
        self._work = folder / "work"
        self._work.mkdir(parents=True)
        self._home.mkdir()
        for name, content in files.items():
            (self._work / name).write_bytes(content)
        self._sourced = ""
        paths = [*map(str, binaries), "/usr/local/bin", "/usr/bin", "/bin"]
        self._environment = {
            "HOME": str(self._home),
            "PATH": os.pathsep.join(paths),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "SHELL": "/bin/bash",
            **agent.quiet,
        }
        self._run(("git", "init", "--quiet"), {})  # else it would work in the project's tree
        self._place = self._home / (agent.settings_at or agent.settings)
        self.set_context(context)
        if agent.settings_once:
            self._run(("sh", str(self._place)), {})
        elif not agent.settings_at:
            self._sourced = f". {self._place} && "

    @property
    def continues(self) -> bool:
        """Whether the agent continues conversations without a terminal."""
        return bool(self._agent.go_on)

    def ask(self, prompt: str) -> Outcome:
        """Begin a conversation."""
        return self._run(self._agent.ask, {"prompt": prompt})

    def go_on(self, prompt: str) -> Outcome:
        """Continue the folder's last conversation."""
        return self._run(self._agent.go_on, {"prompt": prompt})

    def resume(self, conversation: str, prompt: str) -> Outcome:
        """Continue a conversation by its id."""
        return self._run(self._agent.resume, {"prompt": prompt, "id": conversation})

    def interrupt(self, prompt: str, reached: Callable[[], None]) -> Outcome:
        """Continue the last conversation, and press Ctrl-C when `reached` returns.

        One that does not end gets another Ctrl-C, and then a kill.
        """
        process = self._start(self._agent.go_on, {"prompt": prompt})
        try:
            reached()
        finally:
            for signal_sent in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
                os.killpg(process.pid, signal_sent)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE_SECONDS)
                    break
        return self._wait(process)

    def set_context(self, words: int) -> bool:
        """Write the agent's settings, with a context that ends there; True if they name one."""
        text = (SETTINGS / self._agent.settings).read_text(encoding="utf-8")
        text = text.replace(_ADDRESS, self._url).replace(_DOCUMENTED_MODEL, MODEL)
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._place.write_text(text.replace(_DOCUMENTED_CONTEXT, str(words)), encoding="utf-8")
        return _DOCUMENTED_CONTEXT in text

    def find_conversations(self) -> set[str]:
        """Find the ids of the conversations that are stored."""
        if self._agent.id_from:
            text = self._run(self._agent.id_from, {}).text
        else:
            paths = (path.relative_to(self._home) for path in self._home.rglob("*"))
            text = "\n".join(map(str, paths))
        return set(re.findall(self._agent.id, text))

    def _run(self, command: Sequence[str], values: Mapping[str, str]) -> Outcome:
        return self._wait(self._start(command, values))

    def _start(self, command: Sequence[str], values: Mapping[str, str]) -> "subprocess.Popen[str]":
        words = [word.format(model=MODEL, **values) for word in command]
        return subprocess.Popen(
            ["/bin/sh", "-c", f'{self._sourced}exec "$@"', "sh", *words],
            cwd=self._work,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _wait(self, process: "subprocess.Popen[str]") -> Outcome:
        try:
            text, log = process.communicate(timeout=self._seconds)
            return Outcome(process.returncode, text, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the agent left running
            process.wait()

    def close(self) -> None:
        """End what the agent left running in sessions of its own: all that have its HOME."""
        own = f"HOME={self._home}\0".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if own in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
