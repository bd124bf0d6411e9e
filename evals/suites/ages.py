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
from typing import Any, Literal

from evals import harness
from evals.configs import RunConfig
from evals.harness import Message, Session, Setup
from evals.languages.base import Fact, Language
from evals.languages.choice import get_language
from evals.suite import Record, Suite
from evals.summary import group_by, mean, mean_row
from kvrecall_server.reporting.results import Row, speed_row
from workers.positions.chunks import Chunks

FACTS = 42
LENGTHS = (16_000, 48_000)
CONFIGS = ('icecache{"share":0.25}', 'icecache{"share":0.005}')
"""A quarter of the budget is retrieved, or a row: a session that retrieves nothing has no recall, and ends."""
_TOPICS = 4
_CHATS_ON_A_TOPIC = 5

# Whether facts get another value later, in words that say so, or in those of any statement.
Corrected = Literal["no", "marked", "unmarked"]


@dataclass(frozen=True)
class Ages:
    """One conversation of about `tokens` tokens with so many facts, under one configuration.

    `chunk`: tokens of a chunk of positions behind the model's window; 0: the worker's default. `ages`: of the
    facts, in windows of the model, to a quarter of a window; none: all that there are. `corrected`: unless `no`,
    half as many facts are stated, and each gets another value somewhere behind its statement.
    """

    setup: Setup
    tokens: int
    facts: int
    chunk: int = 0
    ages: tuple[float, ...] = ()
    corrected: Corrected = "no"

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.setup.config.name}, {self.tokens} tokens, seed {self.setup.seed}"


@dataclass(frozen=True)
class PlantedFact:
    """A fact, its question, and the number of messages before its statement.

    `before`: the same with the value that it had first; None for a fact that keeps its value.
    """

    fact: Fact
    question: str
    place: int
    before: "PlantedFact | None" = None


def suite(
    setup: Setup,
    configs: Sequence[RunConfig],
    conversations: int,
    lengths: Sequence[int],
    facts: int = FACTS,
    chunks: Sequence[int] = (0,),
    ages: Sequence[float] = (),
    corrected: Corrected = "no",
) -> Suite[Ages]:
    """All configurations, with chunks of each size, on `conversations` conversations of each length."""
    units = [
        Ages(replace(setup, seed=seed, config=config), tokens, facts, chunk, tuple(ages), corrected)
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

    statements = _plan_statements(rng, unit, names)
    stretches = _find_stretches(unit, len(statements), window)
    ends = [begin for begin, _ in stretches[1:]] + [unit.tokens]
    stated = dict[str, PlantedFact]()
    for name, (begin, end), behind in zip(statements, stretches, ends, strict=True):
        place = rng.uniform(begin, begin + 0.8 * (end - begin))
        while length < place:
            say(next(chat))
        before = stated.get(name)
        attribute = rng.choice(language.attributes) if before is None else before.fact.attribute
        fact = Fact(name, attribute, language.draw_value(rng, attribute, used))
        stated[name] = PlantedFact(fact, language.ask(rng, fact), len(messages), before)
        is_marked = before is not None and unit.corrected == "marked"
        word = language.correct if is_marked else language.state
        say([word(rng, fact), language.acknowledge(rng, fact)])
        while length < behind:
            say(next(chat))
    return messages, list(stated.values())


def _plan_statements(rng: random.Random, unit: Ages, names: Sequence[str]) -> list[str]:
    """Plan whose fact each statement is of: one of each, or two of each of half as many, at any two places."""
    if unit.corrected == "no":
        return list(names)
    twice = [*names[: len(names) // 2]] * 2
    rng.shuffle(twice)
    return twice


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
        chunks = session.scheduler.engine.long_sessions.chunks
        records = list[Record]()
        for each in planted:
            position = count_tokens(messages[: each.place])
            record = {
                **_ask(unit, session, each, language),
                "age": length - position,
                "length": length,
                "window": window,
            }
            if each.before is not None:
                before = count_tokens(messages[: each.before.place])
                record["in_order"] = chunks is None or keep_order(chunks, length, before, position)
            records.append(record)
        return records


def keep_order(chunks: Chunks, length: int, first: int, last: int) -> bool:
    """Check if a session of `length` tokens sees the token at `first` before the later one at `last`."""
    if length < chunks.window:
        return True
    shifts = chunks.find_segments(length)
    first_seen, last_seen = (
        chunks.place(at) + next(each.shift for each in reversed(shifts) if each.start <= at)
        for at in (first, last)
    )
    return first_seen <= last_seen


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
        "corrected": unit.corrected,
        "outdated": float(
            planted.before is not None
            and language.is_answer(done.message.content, planted.before.fact.value)
        ),
        "seconds": {"prefill": session.seconds, "answer": time.perf_counter() - started},
    }


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Right answers by length and age, in windows of the model, then seconds of an answer.

    Of facts that got a new value by the order in which both statements are seen.
    """
    rows: list[Row] = []
    placed = [{**each, "place": _name_place(each)} for each in records]
    cells = group_by(placed, "arm", "chunk", "tokens", "corrected", "place")
    for (arm, chunk, tokens, corrected, place), group in sorted(cells.items()):
        columns = {"method": arm, "k": 0, "budget": group[0]["rows"], "tokens": tokens}
        columns["chunk"] = chunk
        if corrected != "no":
            columns["outdated"] = mean(each["outdated"] for each in group)
        rights = [each["right"] for each in group]
        rows += mean_row(f"{tokens} tokens, {place}", rights, seed, **columns)
    for (arm, chunk, tokens), group in group_by(placed, "arm", "chunk", "tokens").items():
        seconds = [each["seconds"]["answer"] for each in group]
        name = f"{arm}, {tokens} tokens, chunks of {chunk or 'default'}"
        rows.append(speed_row(name, "answer", "seconds", seconds))
    return rows


def _name_place(record: Record) -> str:
    """Name where a fact's statements are, for the rows."""
    if record["corrected"] == "no":
        # A statement among the session's last tokens is behind its rows.
        windows = max(0, record["age"]) // record["window"]
        return f"{windows} to {windows + 1} windows ago"
    order = "in their order" if record["in_order"] else "the other way round"
    return f"new value {record['corrected']}, both statements seen {order}"
