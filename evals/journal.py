"""What is done already: a line of JSON per unit, so that a run that was stopped goes on where it was."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evals.errors import BadJournal
from evals.suite import Record, Unit

_COMPUTES = (
    "kvstore",
    "workers",
    "reference",
    "kvrecall.domain.episodes",
    "kvrecall.domain.utterances",
    "evals.codecs",
    "evals.compressed",
    "evals.conditions",
    "evals.suites.longconv.conversations",
    "evals.episodes",
    "evals.harness",
    "evals.suites.mq_niah.case",
    "evals.suites.mq_niah.examples",
    "evals.replay_session",
    "evals.suites.repository.examples",
    "evals.selectors",
    "evals.spans",
)
"""Packages and modules whose code the numbers depend on: a record that other code made is not taken."""


class Journal:
    """An append-only file. A last line that was torn when the process was killed does not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, list[Record]] = {}
        whole = self._read()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def records(self, key: str) -> list[Record] | None:
        """What the unit of this key found; None where it has not run."""
        return self._found.get(key)

    def note(self, key: str, unit: Unit, records: Sequence[Record]) -> None:
        """Keep what a unit found; it is on the disk when this returns."""
        line = json.dumps(
            {"key": key, "unit": _plain(unit), "records": list(records)}, ensure_ascii=False
        )
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._found[key] = json.loads(line)["records"]

    def close(self) -> None:
        """No line can be added any more."""
        self._file.close()

    def _read(self) -> int:
        """Take in the lines; returns how many bytes of the file are whole ones. Raises BadJournal."""
        whole = 0
        for number, line in enumerate(self._lines(), start=1):
            if not line.endswith(b"\n"):
                break
            try:
                noted = json.loads(line)
                self._found[noted["key"]] = noted["records"]
            except (ValueError, KeyError, TypeError) as error:
                raise BadJournal(
                    f"{self._path} line {number} is no unit's: {error!r}; begin anew with --fresh"
                ) from error
            whole += len(line)
        return whole

    def _lines(self) -> list[bytes]:
        try:
            return self._path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []


def key_of(suite: str, unit: Unit) -> str:
    """The same for the same unit of the same suite, computed by the same code."""
    text = json.dumps([suite, type(unit).__name__, _plain(unit), _code()], sort_keys=True)
    return sha256(text.encode()).hexdigest()


def _plain(unit: Any) -> dict[str, Any]:
    return asdict(unit)


@cache
def _code() -> list[str]:
    digest = sha256()
    for name in _COMPUTES:
        found = find_spec(name)
        assert found is not None, f"{name} is a part of this project"
        path = Path(str(found.origin))
        for file in sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]:
            digest.update(file.relative_to(path.parent).as_posix().encode() + file.read_bytes())
    return [digest.hexdigest(), version("torch"), version("transformers")]
