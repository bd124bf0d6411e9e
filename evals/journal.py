"""Journal of finished units: a line of JSON per unit, from which a stopped run resumes."""

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

# Packages and modules whose code the numbers depend on: records that other code made do not count.
_COMPUTES = (
    "kvstore",
    "workers",
    "reference",
    "kvrecall.domain.episodes",
    "kvrecall.domain.passages",
    "kvrecall.domain.utterances",
    "kvrecall_server.replay.formats",
    "kvrecall_server.replay.locomo",
    "evals.codecs",
    "evals.compressed",
    "evals.conditions",
    "evals.suites.ages",
    "evals.suites.earlier.arms",
    "evals.suites.earlier.cases",
    "evals.suites.earlier.remembered_chunks",
    "evals.suites.locomo.answers",
    "evals.suites.locomo.data",
    "evals.suites.longconv.conversations",
    "evals.episodes",
    "evals.harness",
    "evals.languages",
    "evals.suites.methods.cases",
    "evals.suites.mq_niah.case",
    "evals.suites.mq_niah.examples",
    *(
        f"evals.suites.multiturn.{name}"
        for name in (
            "airline",
            "arms",
            "dialogue",
            "examples",
            "locomo",
            "longbench",
            "scores",
            "sessions",
        )
    ),
    "evals.recordings",
    "evals.replay_session",
    "evals.suites.repository.examples",
    "evals.suites.repository.modules",
    "evals.selectors",
    "evals.spans",
    "evals.text_scores",
)


class Journal:
    """An append-only file of units with their records.

    A last line that is truncated, since the process was killed, does not count. Raises BadJournal
    for any other line that is not a unit's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, list[Record]] = {}
        complete_bytes = self._read()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(complete_bytes)

    def records(self, key: str) -> list[Record] | None:
        """Records of the unit with this key; None if it has not run."""
        return self._records.get(key)

    def append(self, key: str, unit: Unit, records: Sequence[Record]) -> None:
        """Append a unit's records; they are on the disk when this returns."""
        line = json.dumps(
            {"key": key, "unit": _fields(unit), "records": list(records)}, ensure_ascii=False
        )
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._records[key] = json.loads(line)["records"]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> int:
        """Read all complete lines; returns their size in bytes. Raises BadJournal."""
        complete_bytes = 0
        for number, line in enumerate(self._lines(), start=1):
            if not line.endswith(b"\n"):
                break
            try:
                entry = json.loads(line)
                self._records[entry["key"]] = entry["records"]
            except (ValueError, KeyError, TypeError) as error:
                raise BadJournal(
                    f"{self._path} line {number} is no unit's: {error!r}; start over with --fresh"
                ) from error
            complete_bytes += len(line)
        return complete_bytes

    def _lines(self) -> list[bytes]:
        try:
            return self._path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []


def unit_key(suite: str, unit: Unit) -> str:
    """Key of a unit: equal for the same unit of the same suite, computed by the same code."""
    parts = [suite, type(unit).__name__, _fields(unit), _code_versions()]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _fields(unit: Any) -> dict[str, Any]:
    return asdict(unit)


@cache
def _code_versions() -> list[str]:
    """Digest of the code in _COMPUTES, and the versions of torch and transformers."""
    digest = sha256()
    for name in _COMPUTES:
        spec = find_spec(name)
        assert spec is not None, f"{name} is a part of this project"
        path = Path(str(spec.origin))
        for file in sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]:
            digest.update(file.relative_to(path.parent).as_posix().encode() + file.read_bytes())
    return [digest.hexdigest(), version("torch"), version("transformers")]
