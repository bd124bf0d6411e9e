"""Suite ages: facts at all places of one conversation, or at some, which may be longer than the model's window.

Each fact is asked for from the conversation's end, so its age is what was said since. The small talk is on
four topics, and all methods have the same budget, in active and retrieved rows per head.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import Any

from evals import harness
from evals.configs import RunConfig
from evals.harness import Message, Session, Setup
from evals.languages.base import Fact, Language
from evals.languages.choice import get_language
from evals.suite import Record, Suite
from evals.summary import group_by, mean_row
from kvrecall_server.reporting.results import Row, speed_row

FACTS = 42
LENGTHS = (16_000, 48_000)
CONFIGS = ('icecache{"share":0.25}', 'icecache{"share":0.005}')
"""A quarter of the budget is retrieved, or a row: a session that retrieves nothing has no recall, and ends."""
_TOPICS = 4
_CHATS_ON_A_TOPIC = 5


@dataclass(frozen=True)
class Ages:
    """One conversation of about `tokens` tokens with so many facts, under one configuration.

    `chunk`: tokens of a chunk of positions behind the model's window; 0: the worker's default. `ages`: of the
    facts, in windows of the model, to a quarter of a window; none: all that there are.
    """

    setup: Setup
    tokens: int
    facts: int
    chunk: int = 0
    ages: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.setup.config.name}, {self.tokens} tokens, seed {self.setup.seed}"


@dataclass(frozen=True)
class PlantedFact:
    """A fact, its question, and the number of messages before its statement."""

    fact: Fact
    question: str
    place: int


def suite(
    setup: Setup,
    configs: Sequence[RunConfig],
    conversations: int,
    lengths: Sequence[int],
    facts: int = FACTS,
    chunks: Sequence[int] = (0,),
    ages: Sequence[float] = (),
) -> Suite[Ages]:
    """All configurations, with chunks of each size, on `conversations` conversations of each length."""
    units = [
        Ages(replace(setup, seed=seed, config=config), tokens, facts, chunk, tuple(ages))
        for tokens in lengths
        for seed in range(setup.seed, setup.seed + conversations)
        for config in configs
        for chunk in chunks
    ]
    return Suite(
        "ages", setup.seed, setup.model, tuple(units), run, partial(result_rows, seed=setup.seed)
    )


def build_conversation(
    unit: Ages, language: Language, count_tokens: Callable[[Sequence[Message]], int], window: int
) -> tuple[list[Message], list[PlantedFact]]:
    """Build a conversation whose facts lie in stretches, each somewhere in its own; window: tokens of an age."""
    rng = random.Random(f"ages:{unit.setup.seed}:{unit.tokens}:{unit.facts}")
    names = language.draw_names(rng)[: unit.facts]
    messages: list[Message] = [{"role": "system", "content": rng.choice(language.system_lines)}]
    planted: list[PlantedFact] = []
    used = set[str]()
    chat = _draw_chat(rng, language)
    length = 0

    def say(exchange: Sequence[str]) -> None:
        nonlocal length
        said: list[Message] = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), exchange, strict=True)
        ]
        length += count_tokens(said)
        messages.extend(said)

    stretches = _find_stretches(unit, len(names), window)
    ends = [begin for begin, _ in stretches[1:]] + [unit.tokens]
    for name, (begin, end), behind in zip(names, stretches, ends, strict=True):
        place = rng.uniform(begin, begin + 0.8 * (end - begin))
        while length < place:
            say(next(chat))
        attribute = rng.choice(language.attributes)
        fact = Fact(name, attribute, language.draw_value(rng, attribute, used))
        planted.append(PlantedFact(fact, language.ask(rng, fact), len(messages)))
        say([language.state(rng, fact), language.acknowledge(rng, fact)])
        while length < behind:
            say(next(chat))
    return messages, planted


def _find_stretches(unit: Ages, facts: int, window: int) -> list[tuple[int, int]]:
    """Find the tokens among which each fact is stated, in order. Raises ValueError for ages that overlap."""
    if not unit.ages:
        return [(unit.tokens * i // facts, unit.tokens * (i + 1) // facts) for i in range(facts)]
    stretches = list[tuple[int, int]]()
    for number, age in enumerate(sorted(unit.ages, reverse=True)):
        middle = unit.tokens - age * window
        first, last = max(0.0, middle - window / 4), min(float(unit.tokens), middle + window / 4)
        if first >= last or (stretches and first < stretches[-1][1]):
            raise ValueError(
                f"ages {unit.ages} do not fit half a window of {window} each into {unit.tokens} tokens"
            )
        count = facts // len(unit.ages) + (number < facts % len(unit.ages))
        at = [round(first + (last - first) * i / count) for i in range(count + 1)]
        stretches += pairwise(at)
    return stretches


def _draw_chat(rng: random.Random, language: Language) -> Iterator[list[str]]:
    """Draw exchanges of small talk without end."""
    topics = rng.sample(language.topics, min(_TOPICS, len(language.topics)))
    said: list[str] = []
    for number in count():
        yield list(
            language.small_talk(rng, topics[number // _CHATS_ON_A_TOPIC % len(topics)], said)
        )


def run(unit: Ages) -> list[Record]:
    """Append the conversation once, and ask for every fact from its end. Raises `workers.errors`."""
    loaded = harness.load(unit.setup.model)
    count_tokens = partial(harness.count_tokens, loaded.tokenizer)
    language = get_language(unit.setup.model, ())
    window = loaded.model.max_context
    messages, planted = build_conversation(unit, language, count_tokens, window)
    with harness.open_session(unit.setup, messages, unit.chunk or None) as session:
        length = session.memory.length
        return [
            {
                **_ask(unit, session, each, language),
                "age": length - count_tokens(messages[: each.place]),
                "length": length,
                "window": window,
            }
            for each in planted
        ]


def _ask(unit: Ages, session: Session, planted: PlantedFact, language: Language) -> dict[str, Any]:
    question = [{"role": "user", "content": planted.question}]
    started = time.perf_counter()
    done = session.ask(question, harness.MAX_REPLY_TOKENS)
    return {
        "arm": unit.setup.config.name,
        "seed": unit.setup.seed,
        "tokens": unit.tokens,
        "chunk": unit.chunk,
        "rows": session.spec.budget,
        "retrieved": done.retrieval.rows,
        "expected": planted.fact.value,
        "reply": done.message.content,
        "right": float(language.is_answer(done.message.content, planted.fact.value)),
        "seconds": {"prefill": session.seconds, "answer": time.perf_counter() - started},
    }


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Right answers by length and age, in windows of the model, then seconds of an answer."""
    rows: list[Row] = []
    aged = [{**each, "windows": each["age"] // each["window"]} for each in records]
    cells = group_by(aged, "arm", "chunk", "tokens", "windows")
    for (arm, chunk, tokens, windows), group in sorted(cells.items()):
        columns = {"method": arm, "k": 0, "budget": group[0]["rows"], "tokens": tokens}
        rows += mean_row(
            f"{tokens} tokens, {windows} to {windows + 1} windows ago",
            [each["right"] for each in group],
            seed,
            **columns,
            chunk=chunk,
            windows_ago=windows,
        )
    for (arm, chunk, tokens), group in group_by(aged, "arm", "chunk", "tokens").items():
        seconds = [each["seconds"]["answer"] for each in group]
        name = f"{arm}, {tokens} tokens, chunks of {chunk or 'default'}"
        rows.append(speed_row(name, "answer", "seconds", seconds))
    return rows
