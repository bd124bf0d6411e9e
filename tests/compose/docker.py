"""The docker program, with the daemon that it talks to."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

# Of one command; a build on a busy machine takes minutes.
LIMIT_SECONDS = 900.0


class DockerFailed(RuntimeError):
    """A command failed; the message has its output."""


@dataclass(frozen=True)
class Docker:
    """Runs commands with `environment` beside this process's own variables."""

    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *arguments: str) -> str:
        """Return what `docker ARGUMENTS` writes to standard output. Raises DockerFailed."""
        return self.run("docker", *arguments)

    def run(self, *command: str) -> str:
        """Return what a command writes to standard output. Raises DockerFailed."""
        done = self._run(*command)
        if done.returncode:
            raise DockerFailed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def succeeds(self, *arguments: str) -> bool:
        """True if `docker ARGUMENTS` ends with 0."""
        try:
            return self._run("docker", *arguments).returncode == 0
        except FileNotFoundError:
            return False

    def has_image(self, name: str) -> bool:
        """True if the daemon has an image, so that nothing has to be pulled."""
        return self.succeeds("image", "inspect", name)

    def _run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            env=os.environ | self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
