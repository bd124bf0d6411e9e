"""Suite planted: facts in real text, asked for after they were evicted and repaired.

A conversation with planted facts is appended to a session with a budget, in turns of about a block,
as in use: rows are evicted block by block, without knowledge of the questions. Then every condition
repairs a fork of that session on the questions, or on a tool's result with a question in it, and is
asked them. All conditions and signals at one K fork the same session, which keeps K rows free;
without repair the session keeps the whole budget.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from evals import harness
from evals.errors import BadSuite
from evals.harness import Message
from evals.spans import find_spans
from evals.suite import Record, Suite
from evals.suites.planted.facts import Fact, Split, draw_facts
from evals.suites.planted.rows import FULL, QUESTIONS, result_rows
from evals.suites.planted.sessions import Cell, Reply, open_engine
from evals.suites.planted.texts import CountTokens, build_text, plant
from evals.suites.planted.tools import build_result
from evals.summary import mean

KS = (16, 32, 48, 96)
NONE = "no repair"
# The default's selection before there was a contrast.
_OLD = '"contrast": 0, "fade_before": 0.6, "fade_after": 0.9'
# Repair settings by condition; none for the two without a repair.
CONDITIONS = (
    (FULL, ""),
    (NONE, ""),
    ("bursts (paper)", '{"select": "bursts", "contrast": 0}'),
    ("bursts, contrast", '{"select": "bursts", "contrast": 2}'),
    ("spread", f'{{"select": "spread", {_OLD}}}'),
    ("default: spread, contrast", '{"select": "spread", "contrast": 2}'),
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
        facts: Facts in the text.
        asked: Numbers of facts that are asked for at once, the first ones; their questions are one
            signal.
        results: Lengths in tokens of tools' results, each another signal, with the question for the
            first fact in it.
        result_data: Recordings that the results are taken from; none: they are generated.
        budget: Rows per head.
        method: Eviction method, as a run configuration (`evals.configs.SYNTAX`).
        k: Rows that a repair may bring back.
        conditions: Names with repair settings; at K = 0 names alone.
        block_tokens: Tokens prefilled in one step.
    """

    model: str
    data: str
    split: Split
    seed: int
    tokens: int = 1000
    facts: int = 1
    asked: tuple[int, ...] = (1,)
    results: tuple[int, ...] = ()
    result_data: tuple[str, ...] = ()
    budget: int = 256
    method: str = "snapkv"
    k: int = 0
    conditions: tuple[tuple[str, str], ...] = CONDITIONS
    block_tokens: int = 128

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        results = ", results" if self.results else ""
        return f"K {self.k}, {self.facts} facts{results}, {self.split}, seed {self.seed}"


@dataclass(frozen=True)
class Signal:
    """What a repair is asked by: messages about some facts. `name` says what they are."""

    name: str
    facts: tuple[Fact, ...]
    messages: tuple[Message, ...]


def suite(
    first: Planted, asked: Sequence[int], ks: Sequence[int], cases: int, results: Sequence[int] = ()
) -> Suite[Planted]:
    """`cases` texts from the first one's seed on, with each number of questions at each K.

    The texts hold as many facts as are ever asked for. Signals of `results` tokens come at the
    largest K alone, for they take long. Text by text, so that a run that was stopped has whole ones.
    """
    common = replace(first, facts=max(asked), asked=tuple(asked))
    without = tuple((name, "") for name in (FULL, NONE) if name in dict(first.conditions))
    repaired = tuple(each for each in first.conditions if each not in without)
    at_each_k = [
        replace(common, k=k, conditions=repaired, results=tuple(results) if k == max(ks) else ())
        for k in ks
        if repaired
    ]
    units = [
        replace(unit, seed=seed)
        for seed in range(first.seed, first.seed + cases)
        for unit in (replace(common, k=0, conditions=without), *at_each_k)
    ]
    return Suite(
        "planted",
        first.seed,
        first.model,
        tuple(units),
        run,
        partial(result_rows, seed=first.seed),
    )


def choose_conditions(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The full cache and the conditions of these names; all without names. Raises BadSuite."""
    known = dict(CONDITIONS)
    for name in names:
        if name not in known:
            raise BadSuite(f"there is no condition {name!r}; there are {', '.join(known)}")
    return tuple((name, known[name]) for name in dict.fromkeys((FULL, *(names or known))))


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
    count_tokens = partial(harness.count_tokens, tokenizer)
    text = build_text(unit.data, unit.split, unit.seed, unit.tokens, count_tokens)
    facts = draw_facts(random.Random(f"planted:facts:{unit.seed}"), unit.split, unit.facts)
    messages = plant(text, facts, unit.seed)
    turns = harness.split_turns(messages, tokenizer, unit.block_tokens)
    rows = unit.tokens + 2 * harness.TURN_TOKENS
    with open_engine(unit.model, rows, len(unit.conditions) + 1, unit.block_tokens) as engine:
        cell = partial(Cell.append, engine, turns=turns, seed=unit.seed)
        if unit.k:
            base = cell(method=unit.method, budget=unit.budget, repair_rows=unit.k)
            return [
                record
                for signal in _build_signals(unit, facts, count_tokens)
                for record in _repairs(unit, base, signal)
            ]
        sizes = {FULL: ("full", rows), NONE: (unit.method, unit.budget)}
        return [
            record
            for name, _ in unit.conditions
            for method, budget in [sizes[name]]
            for record in _measure(unit, name, cell(method=method, budget=budget), facts)
        ]


def _build_signals(
    unit: Planted, facts: Sequence[Fact], count_tokens: CountTokens
) -> Iterator[Signal]:
    """The questions for each number of facts at once, then the tools' results."""
    for count in unit.asked:
        wanted = tuple(facts[:count])
        text = " ".join(fact.question for fact in wanted)
        yield Signal(QUESTIONS, wanted, ({"role": "user", "content": text},))
    for tokens in unit.results:
        source = (unit.result_data, unit.split, unit.seed, tokens)
        message = build_result(*source, facts[0].question, count_tokens)
        yield Signal(f"result of {tokens} tokens", (facts[0],), (message,))


def _measure(unit: Planted, condition: str, base: Cell, facts: Sequence[Fact]) -> Iterator[Record]:
    """Ask a session without a repair, once for all numbers of facts."""
    replies = base.ask(facts)
    base.close()
    for count in unit.asked:
        signal = Signal(QUESTIONS, tuple(facts[:count]), ())
        yield _record(unit, condition, replies[:count], signal)


def _repairs(unit: Planted, base: Cell, signal: Signal) -> Iterator[Record]:
    """Repair a fork per condition on the signal, then ask each of its facts' questions."""
    tokenizer = base.engine.tokenizer
    statements = {fact.statement: fact.statement for fact in signal.facts}
    spans = find_spans(tokenizer, base.token_ids, statements)
    stated = {position for span in spans.values() for position in span}
    template = base.template_tokens()
    for name, settings in unit.conditions:
        result = base.repair(name, settings, signal.messages)
        replies = base.ask(signal.facts, name, settings, result.state)
        promoted = set(result.report.promoted)
        yield {
            **_record(unit, name, replies, signal),
            "promoted": len(promoted),
            "in_statements": len(promoted & stated) / max(1, len(promoted)),
            "in_template": len(promoted & template) / max(1, len(promoted)),
            "brought_back": len(promoted & stated) / len(stated),
            "text": tokenizer.decode([base.token_ids[at] for at in sorted(promoted)]),
            "signal_tokens": result.report.signal_tokens,
            "seconds": result.report.seconds,
        }


def _record(
    unit: Planted, condition: str, replies: Sequence[Reply], signal: Signal
) -> dict[str, Any]:
    return {
        "condition": condition,
        "signal": signal.name,
        "k": unit.k,
        "facts": len(signal.facts),
        "planted": unit.facts,
        "seed": unit.seed,
        "split": unit.split,
        "method": unit.method,
        "budget": unit.budget,
        "expected": [fact.value for fact in signal.facts],
        "replies": [reply.text for reply in replies],
        "right": mean(float(reply.right) for reply in replies),
        "log_prob": mean(reply.log_prob for reply in replies),
    }
