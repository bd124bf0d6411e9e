"""The suite: every candidate answers facts, open requests and conversations, with every seed.

Candidates are chosen on the prompts of the split `tuning` and reported on those of `held-out`.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evals import harness
from evals.harness import Message, Session, Setup
from evals.suite import Record, Suite
from evals.suites.sampling.prompts import FACTS, OPEN, TALKS, Split
from evals.summary import group_by, mean_row, select_kind
from kvrecall_server.reporting.results import Row

FACT_TOKENS = 48
OPEN_TOKENS = 160
_ROWS = 2048
# An answer loops if one of its runs of so many words occurs so often.
_RUN_WORDS = 6
_RUN_TIMES = 3


@dataclass(frozen=True)
class Sampled:
    """One candidate with one seed. `sampling`: JSON object of the parameters' names and values."""

    setup: Setup
    sampling: str
    split: Split

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.sampling}, seed {self.setup.seed}"


def suite(setup: Setup, candidates: Sequence[str], seeds: int, split: Split) -> Suite[Sampled]:
    """All candidates with `seeds` seeds each. Raises ValueError for one that is no JSON object."""
    units = [
        Sampled(replace(setup, seed=seed), json.dumps(json.loads(candidate)), split)
        for candidate in candidates
        for seed in range(setup.seed, setup.seed + seeds)
    ]
    return Suite(
        "sampling",
        setup.seed,
        setup.model,
        tuple(units),
        run,
        partial(result_rows, seed=setup.seed),
    )


def run(unit: Sampled) -> list[Record]:
    """Ask every prompt of the split, each in a new conversation. Raises `workers.errors`."""
    setup = unit.setup
    with harness.open_worker(setup, _ROWS) as worker:
        session = Session(worker, harness.build_spec(setup, _ROWS))
        records = [*_ask_all(session, unit)]
    return [{"sampling": unit.sampling, "seed": setup.seed, **record} for record in records]


def _ask_all(session: Session, unit: Sampled) -> Iterator[Record]:
    for number, (question, accepted) in enumerate(FACTS[unit.split]):
        reply = _ask(session, unit, number, [_user(question)], FACT_TOKENS)
        yield {"kind": "fact", **reply, "right": float(has_word(reply["reply"], accepted))}
    for number, request in enumerate(OPEN[unit.split], 100):
        reply = _ask(session, unit, number, [_user(request)], OPEN_TOKENS)
        yield {"kind": "open", **reply}
    for number, talk in enumerate(TALKS[unit.split], 2):
        messages: list[Message] = []
        for turn, said in enumerate(talk):
            messages.append(_user(said))
            reply = _ask(session, unit, 100 * number + turn, messages, OPEN_TOKENS)
            messages.append({"role": "assistant", "content": reply["reply"]})
            yield {"kind": "talk", **reply}


def _ask(
    session: Session, unit: Sampled, number: int, messages: Sequence[Message], tokens: int
) -> Mapping[str, Any]:
    """Answer the last message; `number` tells the prompt's random numbers from all others'."""
    seed = 1000 * unit.setup.seed + number
    done = session.ask(messages, tokens, seed=seed, **json.loads(unit.sampling))
    reply = done.message.content
    return {"asked": messages[-1]["content"], "reply": reply, "loops": float(loops(reply))}


def loops(text: str) -> bool:
    """Whether a text says the same again and again: a run of six words occurs three times."""
    words = text.split()
    runs = zip(*(words[start:] for start in range(_RUN_WORDS)), strict=False)
    return max(Counter(runs).values(), default=0) >= _RUN_TIMES


def has_word(text: str, accepted: Sequence[str]) -> bool:
    """Whether one of the accepted words is in the text, as whole words and in any case."""
    pattern = "|".join(map(re.escape, accepted))
    return re.search(rf"(?<!\w)(?:{pattern})(?!\w)", text.lower()) is not None


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Of each candidate: facts answered right, and answers that loop, by kind of prompt."""
    rows: list[Row] = []
    for (sampling,), group in group_by(records, "sampling").items():
        common = {"method": sampling}
        right = [each["right"] for each in select_kind(group, "fact")]
        rows += mean_row("facts answered right", right, seed, **common)
        for kind, name in (("open", "open answers that loop"), ("talk", "turns that loop")):
            looping = [each["loops"] for each in select_kind(group, kind)]
            rows += mean_row(name, looping, seed, **common)
    return rows


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
