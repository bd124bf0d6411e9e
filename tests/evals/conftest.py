"""Small settings of real parts: the packaged model, short histories, a suite of trivial units."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evals.configs import parse_config
from evals.harness import Setup
from evals.suite import Suite
from kvrecall.domain.settings.session import EpisodeSettings
from reference import MODEL_PATH

# A suite's module, written to a folder from which a runner's processes can import it, unlike a
# test.
LIGHT = '''
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Square:
    """Its number squared; every run appends a line to the file, and one number may raise."""

    number: int
    seconds: float
    ran: str
    breaks: bool = False

    @property
    def label(self):
        return f"square of {self.number}"


def run(unit):
    time.sleep(unit.seconds)
    with open(unit.ran, "a") as file:
        file.write(f"{unit.number}\\n")
    if unit.breaks:
        raise ValueError("no square today")
    return [{"kind": "square", "number": unit.number, "square": unit.number**2}]


def rows(records):
    return list(records)
'''


@pytest.fixture
def squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Suite[Any]]:
    """A suite of numbers to square. `tmp_path`/ran.txt lists the units that ran, a line each."""
    folder = tmp_path / "modules"
    folder.mkdir()
    name = f"light_{tmp_path.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(LIGHT)
    monkeypatch.syspath_prepend(folder)
    module = import_module(name)

    def make(
        *numbers: int, seconds: Callable[[int], float] = lambda _: 0.0, breaks: int = -1
    ) -> Suite[Any]:
        ran = str(tmp_path / "ran.txt")
        units = tuple(
            module.Square(number, seconds(number), ran, number == breaks) for number in numbers
        )
        return Suite("squares", 0, "none", units, module.run, module.rows)

    return make


@pytest.fixture
def ran(tmp_path: Path) -> Callable[[], list[int]]:
    """The numbers of the units that ran so far, ascending."""
    return lambda: sorted(int(line) for line in (tmp_path / "ran.txt").read_text().split())


@pytest.fixture
def silent() -> Console:
    """A console without output."""
    return Console(quiet=True)


@pytest.fixture
def make_setup() -> Callable[..., Setup]:
    """Factory of setups of the packaged model, by a configuration's text and a budget."""

    def make(
        config: str, budget: str = "1/4", seed: int = 11, block_tokens: int = 64, episodes: int = 2
    ) -> Setup:
        return Setup(
            str(MODEL_PATH),
            parse_config(config),
            budget,
            seed,
            block_tokens,
            EpisodeSettings(count=episodes),
        )

    return make


@pytest.fixture
def without_seconds() -> Callable[[Any], Any]:
    """Records without their seconds: the reproducible part."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: strip(each) for name, each in value.items() if name != "seconds"}
        return [strip(each) for each in value] if isinstance(value, list | tuple) else value

    return strip


_GARDEN = [
    "I planted tomatoes in the garden.",
    "Which tomatoes are they?",
    "Cherry tomatoes, beside the roses.",
    "The roses need water, too.",
]
_MUSIC = [
    "I play the piano in a concert.",
    "Which concert is it?",
    "A concert in the church, with a choir.",
    "I would love to hear the choir.",
]
_QUESTIONS = [
    {
        "question": "Which tomatoes did Ada plant?",
        "answer": "Cherry tomatoes",
        "evidence": ["D1:3"],
        "category": 4,
    },
    {
        "question": "Where is the concert?",
        "answer": "church",
        "evidence": ["D2:1; D2:3"],
        "category": 1,
    },
    {
        "question": "Does Bo like music?",
        "answer": "Yes; he wants to hear it",
        "evidence": ["D9:9"],
        "category": 3,
    },
    {
        "question": "When was the concert?",
        "answer": "2 May",
        "evidence": ["D2:1"],
        "category": 2,
    },
    {"question": "Who sold the roses?", "evidence": ["D1:4"], "category": 5},
]


@pytest.fixture
def locomo_file(tmp_path: Path) -> Path:
    """A file in LoCoMo's form: two sessions, each on a topic of its own, and five questions."""
    sessions = {
        f"session_{number}": [
            {
                "speaker": ("Ada", "Bo")[index % 2],
                "dia_id": f"D{number}:{index + 1}",
                "text": text,
            }
            for index, text in enumerate(texts)
        ]
        for number, texts in ((1, _GARDEN), (2, _MUSIC))
    }
    conversation = {
        "speaker_a": "Ada",
        "speaker_b": "Bo",
        "session_1_date_time": "1 May",
        "session_2_date_time": "2 May",
        **sessions,
    }
    path = tmp_path / "chat.json"
    path.write_text(
        json.dumps({"conversation": conversation, "qa": _QUESTIONS, "sample_id": "chat"})
    )
    return path
