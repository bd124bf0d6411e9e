"""A run: rounds up to a number of faults, several at once, each resumed from its own file."""

import json
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from faults import findings as kinds
from faults import report
from faults.drills.table import run_drills
from faults.findings import Findings, read_findings
from faults.kinds.schedule import CLUSTER, EMBEDDED, FILES_ONLY, POWER, STALE_WRITERS
from faults.load.scripts import Script, scripts
from faults.load.talks import talk_scripts
from faults.rig.processes import QUIET
from faults.rig.setups import (
    Rig,
    Setup,
    cluster,
    embedded,
    embedded_apart,
    endless_model,
    files_only,
)
from faults.rig.shim import PRELOAD, compile_shim
from faults.rig.zygote import Zygote
from faults.rounds import Round
from faults.undisturbed import Undisturbed, undisturbed_service
from reference import MODEL_PATH

SCRIPTS = 8
TALKS = 9
SETUPS: Mapping[str, tuple[Callable[[Path, Rig], Setup], Mapping[str, float]]] = {
    "embedded": (embedded, EMBEDDED),
    "cluster": (cluster, CLUSTER),
    "files only": (files_only, FILES_ONLY),
    "embedded, rows apart": (embedded_apart, EMBEDDED),
    "embedded, power": (embedded, POWER),
    "cluster, stale writers": (cluster, STALE_WRITERS),
}
DRILL_ROUND = "drills"
# Set-ups in which nothing happens to durable rows.
SOUND = ("embedded, power", "cluster, stale writers")
# Set-ups of the rounds, in turn.
TURNS = (
    "cluster",
    "embedded",
    "files only",
    "cluster, stale writers",
    "cluster",
    "embedded, rows apart",
    "files only",
    "embedded, power",
    DRILL_ROUND,
)
# Those in which workers are processes of their own.
TURNS_OF_RANKS = tuple(name for name in TURNS if name.startswith(("cluster", "files only")))


@dataclass(frozen=True)
class Plan:
    """Numbers of faults in total and in a round, of concurrent rounds, and the set-ups in turn.

    Everything else follows from the seed. `kinds` are the only kinds of faults, if there are any;
    `model` is the served model's folder, `ranks` the number of processes of each worker. `window`: tokens of
    the model's context, so that sessions go on behind it; None: its own.
    """

    seed: int
    faults: int
    round_faults: int
    at_once: int
    setups: Sequence[str] = TURNS
    kinds: Sequence[str] = ()
    model: str = str(MODEL_PATH)
    ranks: int = 1
    window: int | None = None

    @property
    def has_episodes(self) -> bool:
        """True if some sessions have episodes: workers of several ranks build none, and such sessions end."""
        return self.ranks == 1 and self.window is None

    @property
    def rounds(self) -> list[int]:
        """Number of faults of each round."""
        whole, rest = divmod(self.faults, self.round_faults)
        return [self.round_faults] * whole + [rest] * bool(rest)


@contextmanager
def open_rig(
    folder: Path, model: Path = MODEL_PATH, ranks: int = 1, window: int | None = None
) -> Iterator[Rig]:
    """Model, zygote and shim of a run; window: as of a `Plan`."""
    shim = compile_shim(folder)
    # Preloaded here: a forked process runs no loader.
    zygote = Zygote(QUIET | ({} if shim is None else {PRELOAD: str(shim)}))
    try:
        yield Rig(endless_model(folder, model, window), zygote, shim, ranks)
    finally:
        zygote.close()


@dataclass
class Run:
    """A run in the folder `work`, in which each finished round leaves a file."""

    plan: Plan
    work: Path
    console: Console
    stop_at: float = float("inf")

    def run(self) -> Findings | None:
        """Run the rounds that are missing; None if `stop_at` came before their end.

        Raises ValueError if `work` belongs to another plan.
        """
        self._check_plan()
        missing = [
            number for number in range(len(self.plan.rounds)) if not self._file(number).exists()
        ]
        if missing:
            self._run(missing)
        if not all(self._file(number).exists() for number in missing):
            return None
        total = Findings()
        for number in range(len(self.plan.rounds)):
            total.add(read_findings(self._file(number)))
        return total

    def _run(self, numbers: Sequence[int]) -> None:
        plan = self.plan
        all_scripts = [
            each for each in scripts(plan.seed, SCRIPTS) if plan.has_episodes or not each.episodes
        ]
        calm = self.work / "undisturbed"
        shutil.rmtree(calm, ignore_errors=True)
        with (
            open_rig(self.work, Path(plan.model), plan.ranks, plan.window) as rig,
            undisturbed_service(
                calm, rig, all_scripts, talk_scripts(self.plan.seed, TALKS)
            ) as undisturbed,
            ThreadPoolExecutor(self.plan.at_once) as pool,
        ):
            list(
                pool.map(
                    lambda number: self._run_round(number, rig, all_scripts, undisturbed), numbers
                )
            )

    def _run_round(
        self, number: int, rig: Rig, all_scripts: Sequence[Script], undisturbed: Undisturbed
    ) -> None:
        if time.monotonic() > self.stop_at:
            return
        start = time.monotonic()
        name = self.plan.setups[number % len(self.plan.setups)]
        folder = self.work / f"round-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            found = self._inject(name, number, folder, rig, all_scripts, undisturbed)
        except Exception:
            found = Findings()
            found.fail(kinds.BROKEN, [f"round {number}: {traceback.format_exc()}"])
        found.write(self._file(number))
        acknowledged = found.counts.get("acknowledged", Counter())
        self.console.print(
            f"round {number}, {name}: {found.faults} faults, {acknowledged['turn']} turns "
            f"acknowledged, {time.monotonic() - start:.0f} s, {'clean' if found.clean else 'NOT CLEAN'}"
        )
        if found.clean:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            report.print_failures(found, self.console)

    def _inject(
        self,
        name: str,
        number: int,
        folder: Path,
        rig: Rig,
        all_scripts: Sequence[Script],
        undisturbed: Undisturbed,
    ) -> Findings:
        seed = f"{self.plan.seed}-{number}"
        faults = self.plan.rounds[number]
        if name == DRILL_ROUND:
            return run_drills(folder, rig, undisturbed.urls, seed, faults, self.plan.kinds)
        build, weights = SETUPS[name]
        if self.plan.kinds:
            weights = {kind: share for kind, share in weights.items() if kind in self.plan.kinds}
        round_ = Round(build(folder, rig), all_scripts, undisturbed, seed, name in SOUND)
        return round_.run(weights, faults)

    def _check_plan(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        file = self.work / "plan.json"
        plan = json.dumps({**asdict(self.plan), "at_once": None})
        if not file.exists():
            file.write_text(plan, encoding="utf-8")
        if file.read_text(encoding="utf-8") != plan:
            raise ValueError(
                f"{self.work} is the folder of another plan; name another one with --work"
            )

    def _file(self, number: int) -> Path:
        return self.work / f"round-{number}.json"
