"""The result file of every measurement (design section 9), and bootstrap intervals of means."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kvrecall_server.app.errors import BadResultFile

Row = Mapping[str, Any]
_DISTRIBUTIONS = ("kvrecall", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Results:
    """Results of a measurement, with all that is needed to repeat it.

    A quality row has condition, method, budget, mean, ci_low, ci_high, n; a speed row has
    condition, metric, unit, median, p95, n, ratio_to, ratio. Keys that do not apply are absent.
    """

    suite: str
    command: str
    seed: int
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    model: str
    results: Sequence[Row]

    def to_json(self) -> str:
        """The file's content, JSON with a final newline."""
        return (
            json.dumps(vars(self) | {"results": list(self.results)}, indent=1, ensure_ascii=False)
            + "\n"
        )

    def write(self, path: Path) -> None:
        """Write the file; creates its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")


def build_results(suite: str, seed: int, model: str, rows: Sequence[Row]) -> Results:
    """Results with this process's command line, library versions and machine."""
    return Results(suite, command_line(sys.argv), seed, versions(), machine(), model, rows)


def read_results(path: Path) -> Results:
    """Read a result file. Raises BadResultFile."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadResultFile(f"{path} cannot be read as JSON: {error}") from error
    names = list(Results.__dataclass_fields__)
    if not isinstance(content, dict) or not all(name in content for name in names):
        raise BadResultFile(f"{path} is not a result file: it needs the keys {', '.join(names)}")
    if not isinstance(content["results"], list) or not all(
        isinstance(row, dict) for row in content["results"]
    ):
        raise BadResultFile(f"{path} is not a result file: its results are not a list of objects")
    return Results(**{name: content[name] for name in names})


def command_line(arguments: Sequence[str]) -> str:
    """A command line as text, without absolute paths of the machine."""
    program, *options = arguments
    names = (Path(each).name if Path(each).is_absolute() else each for each in options)
    return shlex.join([*_command(Path(program)), *names])


def _command(program: Path) -> list[str]:
    """The command of a program: a module of a package is run by its name."""
    if program.name == "kvrecall":
        return ["kvrecall"]
    module = [] if program.name == "__main__.py" else [program.stem]
    folder = program.parent
    while (folder / "__init__.py").exists():
        module.insert(0, folder.name)
        folder = folder.parent
    is_module = module and (program.name == "__main__.py" or len(module) > 1)
    return ["python", "-m", ".".join(module)] if is_module else ["python", program.name]


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that the results depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in _DISTRIBUTIONS}}


def machine() -> dict[str, Any]:
    """Processor, cores, threads and GPU of this machine, without its host name."""
    import torch  # takes a second: only result files need it

    description: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        description["gpu"] = torch.cuda.get_device_name()
    return description


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% bootstrap interval over n values."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap(values: Sequence[float], seed: int = 0, draws: int = 4000) -> Estimate | None:
    """Mean and 95% percentile bootstrap interval of `draws` resampled means; None for no values."""
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(sample), (draws, len(sample)))
    low, high = np.percentile(sample[picks].mean(axis=1), [2.5, 97.5])
    return Estimate(float(sample.mean()), float(low), float(high), len(sample))


def quality_row(condition: str, estimate: Estimate, **common: Any) -> Row:
    """A quality row; `common` are its other keys (method, k, budget, ...)."""
    interval = {"mean": estimate.mean, "ci_low": estimate.low, "ci_high": estimate.high}
    return {
        "condition": condition,
        **common,
        **{k: round(v, 4) for k, v in interval.items()},
        "n": estimate.n,
    }


def speed_row(
    condition: str, metric: str, unit: str, values: Sequence[float], **common: Any
) -> Row:
    """A speed row: median and 95th percentile of at least one value."""
    median, p95 = np.percentile(np.asarray(values, dtype=np.float64), [50, 95])
    spread = {"median": round(float(median), 6), "p95": round(float(p95), 6), "n": len(values)}
    return {"condition": condition, "metric": metric, "unit": unit, **spread, **common}
