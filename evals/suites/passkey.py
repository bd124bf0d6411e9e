"""Suite passkey: one fact among small talk, by its depth and the history's length: a heat map per method.

The fact is one of the reference model's language, with a held-out name and value, the small talk is on four topics.
All methods have the same budget, in active rows per head, averaged over layers.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from evals import episodes, harness
from evals.configs import FULL, Arm, arm_of
from evals.harness import Message, Session, Setup
from evals.suite import Record, Suite
from evals.summary import grouped, mean_row
from kvrecall.reporting.results import Row, speed_row
from reference.chat import TOPICS, small_talk
from reference.conversation import (
    CLAUSE,
    NOTED,
    QUESTIONS,
    STATEMENTS,
    SYSTEM_LINES,
    gives,
    sentence,
)
from reference.words import ATTRIBUTES, names_for, value_for

LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TOPICS = 4


@dataclass(frozen=True)
class Passkey:
    """One history under one arm, with the passkey at each depth: 0 is the history's beginning, 1 its end."""

    setup: Setup
    tokens: int
    depths: tuple[float, ...]

    @property
    def label(self) -> str:
        """For the progress bar."""
        return f"{self.setup.arm.name}, {self.tokens} tokens, seed {self.setup.seed}"


@dataclass(frozen=True)
class Hidden:
    """A history without the fact, the exchange that states it, the question and the value asked for."""

    system: Message
    chat: tuple[tuple[Message, Message], ...]
    statement: tuple[Message, Message]
    question: str
    value: str

    def messages(self, depth: float) -> list[Message]:
        """The history with the statement after a share `depth` of its exchanges."""
        place = round(depth * len(self.chat))
        said = [*self.chat[:place], self.statement, *self.chat[place:]]
        return [self.system, *(message for exchange in said for message in exchange)]

    def is_answered_by(self, reply: str) -> bool:
        """Whether a reply ends in exactly the value asked for."""
        return gives(reply, self.value)


def suite(
    setup: Setup,
    arms: Sequence[Arm],
    conversations: int,
    lengths: Sequence[int],
    depths: Sequence[float],
) -> Suite[Passkey]:
    """All arms and the full cache, on so many histories of each length."""
    units = [
        Passkey(
            replace(setup, seed=seed, arm=arm, budget=setup.budget if arm.evicts else "1/1"),
            tokens,
            tuple(depths),
        )
        for tokens in lengths
        for seed in range(setup.seed, setup.seed + conversations)
        for arm in dict.fromkeys((arm_of(FULL), *arms))
    ]
    return Suite(
        "passkey", setup.seed, setup.model, tuple(units), run, partial(result_rows, seed=setup.seed)
    )


def hidden(seed: int, tokens: int, length_of: Callable[[Sequence[Message]], int]) -> Hidden:
    """A history of about `tokens` tokens, as `length_of` counts those of an exchange, and its passkey."""
    rng = random.Random(f"passkey:{seed}:{tokens}")
    topics = rng.sample(sorted(TOPICS), _TOPICS)
    said = list[str]()
    chat = list[tuple[Message, Message]]()
    length = 0
    for number in count():
        if length >= tokens:
            break
        chat.append(_exchange(*small_talk(rng, topics[number // 5 % _TOPICS], said)))
        length += length_of(chat[-1])
    name = names_for(rng, "held_out")[0]
    attribute = rng.choice(sorted(ATTRIBUTES))
    value = value_for(attribute, rng, "held_out")
    clause = CLAUSE.format(name=name, attribute=attribute, value=value)
    stated = rng.choice(STATEMENTS).format(clause=clause)
    return Hidden(
        system={"role": "system", "content": rng.choice(SYSTEM_LINES)},
        chat=tuple(chat),
        statement=_exchange(sentence(stated), rng.choice(NOTED)),
        question=rng.choice(QUESTIONS).format(name=name, attribute=attribute),
        value=value,
    )


def run(unit: Passkey) -> list[Record]:
    """Say the history and ask, once per depth, each in a session of its own. Raises `workers.errors`."""
    setup = unit.setup
    tokenizer = harness.loaded(setup.model).tokenizer
    told = hidden(setup.seed, unit.tokens, partial(harness.tokens_of, tokenizer))
    records = list[Record]()
    for depth in unit.depths:
        with harness.remembered(setup, told.messages(depth)) as session:
            records.append({**_asked(setup, session, told), "tokens": unit.tokens, "depth": depth})
    return records


def _asked(setup: Setup, session: Session, told: Hidden) -> Record:
    chosen = episodes.matched(episodes.built_for(setup, session), told.question)
    started = time.perf_counter()
    done = session.ask(
        [{"role": "user", "content": told.question}],
        harness.MOST_REPLY_TOKENS,
        chosen.episode if chosen else None,
    )
    return {
        "arm": setup.arm.name,
        "seed": setup.seed,
        "budget": setup.budget,
        "rows": session.spec.budget,
        "length": session.memory.length,
        "active_rows": round(harness.active_rows(session), 2),
        "expected": told.value,
        "reply": done.message.content,
        "right": float(told.is_answered_by(done.message.content)),
        "seconds": {"prefill": session.seconds, "answer": time.perf_counter() - started},
    }


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Each method's accuracy at each length, then at each depth as well, then seconds."""
    rows: list[Row] = []
    for (arm, tokens), found in grouped(records, "arm", "tokens").items():
        told = {**_common(arm, found), "tokens": tokens}
        rows += mean_row("all depths", [each["right"] for each in found], seed, **told)
    for (arm, tokens, depth), found in grouped(records, "arm", "tokens", "depth").items():
        told = {**_common(arm, found), "tokens": tokens, "depth": depth}
        rows += mean_row(
            f"{tokens} tokens, depth {depth}", [each["right"] for each in found], seed, **told
        )
    for (arm, tokens), found in grouped(records, "arm", "tokens").items():
        name = f"{arm}, {tokens} tokens"
        rows.append(
            speed_row(name, "prefill", "seconds", [each["seconds"]["prefill"] for each in found])
        )
    return rows


def _common(arm: str, found: Sequence[Record]) -> dict[str, Any]:
    active = max(each["active_rows"] for each in found)
    common = {"method": arm, "k": 0, "active_rows": active}
    return common if arm == FULL else {**common, "budget": found[0]["rows"]}


def _exchange(user: str, reply: str) -> tuple[Message, Message]:
    return {"role": "user", "content": user}, {"role": "assistant", "content": reply}
