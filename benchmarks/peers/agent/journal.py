"""Peers that have run: a file each, so that an interrupted run goes on with the next peer."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.agent.session import Measured
from benchmarks.peers.plan import Plan


@dataclass(frozen=True)
class PeerRun:
    """All turns of a peer, the versions of its libraries; or why it did not run."""

    peer: str
    turns: tuple[Measured, ...]
    versions: Mapping[str, str]
    not_run: str | None = None


def find_run(folder: Path, plan: Plan, peer: str) -> PeerRun | None:
    """Find the run of a peer by the same plan; None where there is none that has run."""
    path = _path(folder, peer)
    if not path.exists():
        return None
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if stored["plan"] != _plan(plan):
        return None
    turns = tuple(Measured(**turn) for turn in stored["turns"])
    return PeerRun(peer, turns, stored["versions"])


def store_run(folder: Path, plan: Plan, run: PeerRun) -> None:
    """Store the run of a peer, over an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        "plan": _plan(plan),
        "peer": run.peer,
        "versions": dict(run.versions),
        "turns": [asdict(turn) for turn in run.turns],
    }
    draft = _path(folder, run.peer).with_suffix(".draft")
    draft.write_text(json.dumps(stored, indent=1), encoding="utf-8")
    draft.replace(_path(folder, run.peer))


def _path(folder: Path, peer: str) -> Path:
    return folder / f"{re.sub('[^a-z0-9]+', '-', peer.lower()).strip('-')}.json"


def _plan(plan: Plan) -> dict[str, Any]:
    """A plan as it reads back from JSON."""
    read: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    return read
