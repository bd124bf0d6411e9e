"""Questions in a new session about earlier ones, by what the new session has of them.

All have the same method and budget. Of arms that append what was said once, an answer's time is without that.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from evals import harness
from evals.harness import Setup
from evals.suite import Record, Suite
from evals.suites.earlier.arms import ARMS, Question
from evals.suites.earlier.cases import Asked, Case, plant_facts, read_locomo
from evals.suites.locomo.data import list_files
from evals.summary import group_by, mean_row
from kvrecall_server.reporting.results import Row, speed_row

CONFIG = 'icecache{"share":0.25}'
# Arms whose rows may lie behind the window, or count as if they did.
_BY_CHUNKS = ("rows", "one session")


@dataclass(frozen=True)
class Earlier:
    """One case under one arm.

    Attributes:
        setup: Method and budget; its seed is the case's.
        arm: One of `ARMS`.
        chunk: Tokens of a chunk of positions; 0: the worker's default.
        sessions: Earlier sessions of generated conversations.
        tokens: Length of each of these, about.
        questions: All that are asked; of generated conversations, the facts that are stated.
        paths: LoCoMo files, whose sessions and questions are taken; none for generated conversations.
    """

    setup: Setup
    arm: str
    chunk: int
    sessions: int
    tokens: int
    questions: int
    paths: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.arm}, {self.case}"

    @property
    def case(self) -> str:
        """Name of what is held and asked."""
        names = [Path(path).stem for path in self.paths]
        return " ".join(names) or f"{self.sessions} sessions, seed {self.setup.seed}"


def suite(
    first: Earlier, arms: Sequence[str], chunks: Sequence[int], cases: int, sources: Sequence[Path]
) -> Suite[Earlier]:
    """All arms on so many cases, those whose rows are seen by chunks with each size of these.

    sources: LoCoMo's files, or a folder of them; several: one case of all. Raises BadDataFile.
    """
    seed = first.setup.seed
    if not sources:
        own = [replace(first, setup=replace(first.setup, seed=seed + i)) for i in range(cases)]
    else:
        paths = [str(path) for each in sources for path in list_files(each)]
        groups = [(path,) for path in paths] if len(sources) == 1 else [tuple(paths)]
        own = [replace(first, paths=group) for group in groups[:cases]]
    units = [
        replace(each, arm=arm, chunk=chunk)
        for each in own
        for arm in arms
        for chunk in (chunks if arm in _BY_CHUNKS else (0,))
    ]
    model = first.setup.model
    return Suite("earlier", seed, model, tuple(units), run, partial(result_rows, seed=seed))


def run(unit: Earlier) -> list[Record]:
    """Hold the earlier sessions, and ask all questions after them. Raises `workers.errors`, BadDataFile."""
    case = _build(unit)
    began = time.perf_counter()
    with ARMS[unit.arm](unit.setup, case, unit.chunk or None) as ask:
        before = time.perf_counter() - began
        return [_ask(unit, ask(each.text), each, before) for each in case.questions]


def _build(unit: Earlier) -> Case:
    if unit.paths:
        return read_locomo([Path(path) for path in unit.paths], unit.questions)
    return plant_facts(unit.setup, unit.sessions, unit.tokens, unit.questions)


def _ask(unit: Earlier, question: Question, asked: Asked, before: float) -> Record:
    started = time.perf_counter()
    messages = [*question.lead, {"role": "user", "content": asked.text}]
    done = question.session.ask(messages, harness.MAX_REPLY_TOKENS, remembered=question.remembered)
    whole = time.perf_counter() - started
    reply = done.message.content
    return {
        "arm": unit.arm,
        "chunk": unit.chunk,
        "case": unit.case,
        "measure": "F1" if unit.paths else "right answers",
        "asked": asked.text,
        "expected": asked.expected,
        "reply": reply,
        "score": asked.score(reply),
        "rows": question.session.spec.budget,
        "prompt_tokens": done.prompt_tokens,
        "seconds": {"before": before, "first_token": whole - done.seconds["decode"]},
    }


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Answers by arm, then the seconds to their first token and those that the sessions before took."""
    rows: list[Row] = []
    groups = group_by(records, "arm", "chunk", "measure")
    for (arm, chunk, measure), group in groups.items():
        name = _name(arm, chunk)
        columns = {"method": name, "k": 0, "budget": group[0]["rows"], "chunk": chunk}
        scores = [each["score"] for each in group]
        rows += mean_row(f"{measure}, a new session", scores, seed, **columns)
    for (arm, chunk, _), group in groups.items():
        name = _name(arm, chunk)
        seconds = [each["seconds"] for each in group]
        rows.append(
            speed_row(name, "first token", "seconds", [each["first_token"] for each in seconds])
        )
        spent = {each["case"]: each["seconds"]["before"] for each in group}
        rows.append(speed_row(name, "sessions before", "seconds", list(spent.values())))
    return rows


def _name(arm: str, chunk: int) -> str:
    return f"{arm}, chunks of {chunk}" if chunk else arm
