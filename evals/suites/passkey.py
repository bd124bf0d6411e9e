"""Suite passkey: one fact among small talk, by its depth and the length of the history.

The fact is in the reference model's language, with a held-out name and value; the small talk is on
four topics. All methods have the same budget, in active rows per head, averaged over layers.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from evals import episodes, harness
from evals.configs import FULL, RunConfig, parse_config
from evals.harness import Message, Session, Setup
from evals.suite import Record, Suite
from evals.summary import group_by, mean_row
from kvrecall.reporting.results import Row, speed_row
from reference.chat import TOPICS, small_talk
from reference.conversation import (
    CLAUSE,
    NOTED,
    QUESTIONS,
    STATEMENTS,
    SYSTEM_LINES,
    capitalize,
    ends_in,
)
from reference.words import ATTRIBUTES, draw_names, draw_value

LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TOPICS = 4
_CHATS_ON_A_TOPIC = 5


@dataclass(frozen=True)
class Passkey:
    """One history under one configuration, with the passkey at each depth.

    Depth 0 is the history's beginning, 1 its end.
    """

    setup: Setup
    tokens: int
    depths: tuple[float, ...]

    @property
    def label(self) -> str:
        """Short text for the progress bar."""
        return f"{self.setup.config.name}, {self.tokens} tokens, seed {self.setup.seed}"


@dataclass(frozen=True)
class PasskeyHistory:
    """A history without the fact, the exchange that states it, the question and the answer."""

    system: Message
    chat: tuple[tuple[Message, Message], ...]
    statement: tuple[Message, Message]
    question: str
    value: str

    def messages(self, depth: float) -> list[Message]:
        """The history with the statement after a share `depth` of its exchanges."""
        index = round(depth * len(self.chat))
        exchanges = [*self.chat[:index], self.statement, *self.chat[index:]]
        return [self.system, *(message for exchange in exchanges for message in exchange)]

    def is_answered_by(self, reply: str) -> bool:
        """True if a reply ends in exactly the expected value."""
        return ends_in(reply, self.value)


def suite(
    setup: Setup,
    configs: Sequence[RunConfig],
    conversations: int,
    lengths: Sequence[int],
    depths: Sequence[float],
) -> Suite[Passkey]:
    """All configurations and the full cache on `conversations` histories of each length."""
    units = [
        Passkey(
            replace(
                setup, seed=seed, config=config, budget=setup.budget if config.evicts else "1/1"
            ),
            tokens,
            tuple(depths),
        )
        for tokens in lengths
        for seed in range(setup.seed, setup.seed + conversations)
        for config in dict.fromkeys((parse_config(FULL), *configs))
    ]
    return Suite(
        "passkey", setup.seed, setup.model, tuple(units), run, partial(result_rows, seed=setup.seed)
    )


def build_history(
    seed: int, tokens: int, count_tokens: Callable[[Sequence[Message]], int]
) -> PasskeyHistory:
    """A history of about `tokens` tokens and its passkey.

    `count_tokens` counts the tokens of an exchange.
    """
    rng = random.Random(f"passkey:{seed}:{tokens}")
    chat = _draw_chat(rng, tokens, count_tokens)
    name = draw_names(rng, "held_out")[0]
    attribute = rng.choice(sorted(ATTRIBUTES))
    value = draw_value(attribute, rng, "held_out")
    clause = CLAUSE.format(name=name, attribute=attribute, value=value)
    statement = rng.choice(STATEMENTS).format(clause=clause)
    return PasskeyHistory(
        system={"role": "system", "content": rng.choice(SYSTEM_LINES)},
        chat=chat,
        statement=_exchange(capitalize(statement), rng.choice(NOTED)),
        question=rng.choice(QUESTIONS).format(name=name, attribute=attribute),
        value=value,
    )


def _draw_chat(
    rng: random.Random, tokens: int, count_tokens: Callable[[Sequence[Message]], int]
) -> tuple[tuple[Message, Message], ...]:
    topics = rng.sample(sorted(TOPICS), _TOPICS)
    sentences = list[str]()
    chat = list[tuple[Message, Message]]()
    length = 0
    for number in count():
        if length >= tokens:
            break
        topic = topics[number // _CHATS_ON_A_TOPIC % _TOPICS]
        chat.append(_exchange(*small_talk(rng, topic, sentences)))
        length += count_tokens(chat[-1])
    return tuple(chat)


def run(unit: Passkey) -> list[Record]:
    """Append the history and ask, once per depth, each in a session of its own.

    Raises `workers.errors`.
    """
    setup = unit.setup
    tokenizer = harness.load(setup.model).tokenizer
    history = build_history(setup.seed, unit.tokens, partial(harness.count_tokens, tokenizer))
    records = list[Record]()
    for depth in unit.depths:
        with harness.open_session(setup, history.messages(depth)) as session:
            record = _ask(setup, session, history)
            records.append({**record, "tokens": unit.tokens, "depth": depth})
    return records


def _ask(setup: Setup, session: Session, history: PasskeyHistory) -> Record:
    matched = episodes.match_text(episodes.build_for(setup, session), history.question)
    started = time.perf_counter()
    done = session.ask(
        [{"role": "user", "content": history.question}],
        harness.MAX_REPLY_TOKENS,
        matched.episode if matched else None,
    )
    return {
        "arm": setup.config.name,
        "seed": setup.seed,
        "budget": setup.budget,
        "rows": session.spec.budget,
        "length": session.memory.length,
        "active_rows": round(harness.active_rows(session), 2),
        "expected": history.value,
        "reply": done.message.content,
        "right": float(history.is_answered_by(done.message.content)),
        "seconds": {"prefill": session.seconds, "answer": time.perf_counter() - started},
    }


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Each method's accuracy at each length, then at each depth as well, then seconds."""
    rows: list[Row] = []
    for (config, tokens), group in group_by(records, "arm", "tokens").items():
        columns = {**_common(config, group), "tokens": tokens}
        rows += mean_row("all depths", [each["right"] for each in group], seed, **columns)
    for (config, tokens, depth), group in group_by(records, "arm", "tokens", "depth").items():
        columns = {**_common(config, group), "tokens": tokens, "depth": depth}
        rows += mean_row(
            f"{tokens} tokens, depth {depth}", [each["right"] for each in group], seed, **columns
        )
    for (config, tokens), group in group_by(records, "arm", "tokens").items():
        name = f"{config}, {tokens} tokens"
        rows.append(
            speed_row(name, "prefill", "seconds", [each["seconds"]["prefill"] for each in group])
        )
    return rows


def _common(config: str, group: Sequence[Record]) -> dict[str, Any]:
    active = max(each["active_rows"] for each in group)
    common = {"method": config, "k": 0, "active_rows": active}
    return common if config == FULL else {**common, "budget": group[0]["rows"]}


def _exchange(user: str, reply: str) -> tuple[Message, Message]:
    return {"role": "user", "content": user}, {"role": "assistant", "content": reply}
