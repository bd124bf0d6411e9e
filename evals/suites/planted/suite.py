"""Suite planted: facts in real text, asked for after they were evicted and repaired.

A conversation with planted facts is appended to a session with a budget, in turns of about a block,
as in use: rows are evicted block by block, without knowledge of the questions. Then every condition
repairs a fork of that session on the questions, and is asked them. All conditions at one K fork the
same session, which keeps K rows free; without repair the session keeps the whole budget.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from evals import harness
from evals.errors import BadSuite
from evals.harness import Message
from evals.spans import find_spans
from evals.suite import Record, Suite
from evals.suites.planted.facts import Fact, Split, draw_facts
from evals.suites.planted.rows import result_rows
from evals.suites.planted.sessions import Cell, Reply, open_engine
from evals.suites.planted.texts import build_text, plant
from evals.summary import mean

KS = (16, 32, 48, 96)
FULL = "full cache"
NONE = "no repair"
# The default's selection before there was a contrast.
_OLD = '"contrast": 0, "fade_before": 0.6, "fade_after": 0.9'
# Repair settings by condition.
CONDITIONS = (
    ("bursts (paper)", '{"select": "bursts", "contrast": 0}'),
    ("bursts, contrast", '{"select": "bursts", "contrast": 2}'),
    ("spread", f'{{"select": "spread", {_OLD}}}'),
    ("default: spread, contrast", '{"select": "spread", "contrast": 2}'),
    ("per head", f'{{"select": "spread", "per_head": true, {_OLD}}}'),
    ("per head, contrast", '{"select": "spread", "per_head": true, "contrast": 2}'),
)


@dataclass(frozen=True)
class Planted:
    """One text with its facts, and every condition at one K; at K = 0 those without a repair.

    Attributes:
        model: Path or hub name.
        data: Folder of LoCoMo files; empty for generated text.
        split: Texts, forms and names that settings were chosen on, or the others.
        seed: Seed of text, facts and places.
        tokens: Length of the text.
        facts: Facts that are asked for; their questions are one signal.
        budget: Rows per head.
        method: Eviction method.
        k: Rows that a repair may bring back.
        conditions: Names with repair settings.
        block_tokens: Tokens prefilled in one step.
    """

    model: str
    data: str
    split: Split
    seed: int
    tokens: int = 1000
    facts: int = 1
    budget: int = 256
    method: str = "snapkv"
    k: int = 0
    conditions: tuple[tuple[str, str], ...] = CONDITIONS
    block_tokens: int = 128

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"K {self.k}, {self.facts} facts, {self.split}, seed {self.seed}"


def suite(first: Planted, facts: Sequence[int], ks: Sequence[int], cases: int) -> Suite[Planted]:
    """`cases` texts from the first one's seed on, with each number of facts, at each K."""
    units = [
        replace(first, facts=count, seed=seed, k=k, conditions=first.conditions if k else ())
        for count in facts
        for seed in range(first.seed, first.seed + cases)
        for k in (0, *ks)
    ]
    return Suite(
        "planted",
        first.seed,
        first.model,
        tuple(units),
        run,
        partial(result_rows, seed=first.seed),
    )


def parse_split(text: str) -> Split:
    """The split of this name. Raises BadSuite."""
    known: tuple[Split, ...] = get_args(Split)
    for split in known:
        if split == text:
            return split
    raise BadSuite(f"there is no split {text!r}; there are {', '.join(known)}")


def run(unit: Planted) -> list[Record]:
    """Append the text, then repair and ask in a fork per condition.

    Raises BadDataFile, `workers.errors`.
    """
    tokenizer = harness.load(unit.model).tokenizer
    text = build_text(
        unit.data, unit.split, unit.seed, unit.tokens, partial(harness.count_tokens, tokenizer)
    )
    facts = draw_facts(random.Random(f"planted:facts:{unit.seed}"), unit.split, unit.facts)
    messages = plant(text, facts, unit.seed)
    turns = harness.split_turns(messages, tokenizer, unit.block_tokens)
    rows = unit.tokens + 2 * harness.TURN_TOKENS
    with open_engine(unit.model, rows, len(unit.conditions) + 1, unit.block_tokens) as engine:
        cell = partial(Cell.append, engine, turns=turns, seed=unit.seed)
        if unit.k:
            base = cell(method=unit.method, budget=unit.budget, repair_rows=unit.k)
            return _repairs(unit, base, facts)
        return [
            _measure(unit, FULL, cell(method="full", budget=rows), facts),
            _measure(unit, NONE, cell(method=unit.method, budget=unit.budget), facts),
        ]


def _measure(unit: Planted, condition: str, base: Cell, facts: Sequence[Fact]) -> Record:
    """Ask a session without a repair."""
    record = _record(unit, condition, base.ask(facts), facts)
    base.close()
    return record


def _repairs(unit: Planted, base: Cell, facts: Sequence[Fact]) -> list[Record]:
    """Repair a fork per condition on all questions at once, then ask each of them."""
    settings = dict(unit.conditions)
    signal: list[Message] = [{"role": "user", "content": " ".join(fact.question for fact in facts)}]
    repaired = {name: base.repair(name, settings[name], signal) for name in settings}
    replies = {
        name: base.ask(facts, name, settings[name], result.state)
        for name, result in repaired.items()
    }
    spans = find_spans(
        base.engine.tokenizer, base.token_ids, {fact.statement: fact.statement for fact in facts}
    )
    stated = {position for span in spans.values() for position in span}
    template = base.template_tokens()
    base.close()
    records: list[Record] = []
    for name, result in repaired.items():
        promoted = set(result.report.promoted)
        records.append(
            {
                **_record(unit, name, replies[name], facts),
                "promoted": len(promoted),
                "in_statements": len(promoted & stated) / max(1, len(promoted)),
                "in_template": len(promoted & template) / max(1, len(promoted)),
                "seconds": result.report.seconds,
            }
        )
    return records


def _record(
    unit: Planted, condition: str, replies: Sequence[Reply], facts: Sequence[Fact]
) -> dict[str, Any]:
    return {
        "condition": condition,
        "k": unit.k,
        "facts": unit.facts,
        "seed": unit.seed,
        "split": unit.split,
        "method": unit.method,
        "budget": unit.budget,
        "expected": [fact.value for fact in facts],
        "replies": [reply.text for reply in replies],
        "right": mean(float(reply.right) for reply in replies),
        "log_prob": mean(reply.log_prob for reply in replies),
    }
