"""Suite passkey: one fact among small talk, by its depth and the length of the history.

The small talk is on four topics. All methods have the same budget, in active rows per head, averaged over layers.
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
from evals.languages.base import Fact, Language
from evals.languages.choice import get_language
from evals.languages.reference import REFERENCE
from evals.suite import Record, Suite
from evals.summary import group_by, mean_row, split_cells
from kvrecall_server.reporting.results import Row, speed_row

LENGTHS = (1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_TOPICS = 4
_CHATS_ON_A_TOPIC = 5


@dataclass(frozen=True)
class Passkey:
    """One history under one configuration, with the passkey at each depth.

    Depth 0 is the history's beginning, 1 its end. `data` are files and folders with recordings that
    the small talk is taken from; none: it is generated.
    """

    setup: Setup
    tokens: int
    depths: tuple[float, ...]
    data: tuple[str, ...] = ()

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


def suite(
    setup: Setup,
    configs: Sequence[RunConfig],
    conversations: int,
    lengths: Sequence[int],
    depths: Sequence[float],
    data: Sequence[str] = (),
) -> Suite[Passkey]:
    """All configurations and the full cache on `conversations` histories of each length."""
    units = [
        Passkey(
            replace(
                setup, seed=seed, config=config, budget=setup.budget if config.evicts else "1/1"
            ),
            tokens,
            tuple(depths),
            tuple(data),
        )
        for tokens in lengths
        for seed in range(setup.seed, setup.seed + conversations)
        for config in dict.fromkeys((parse_config(FULL), *configs))
    ]
    return Suite(
        "passkey", setup.seed, setup.model, tuple(units), run, partial(result_rows, seed=setup.seed)
    )


def build_history(
    seed: int,
    tokens: int,
    count_tokens: Callable[[Sequence[Message]], int],
    language: Language = REFERENCE,
) -> PasskeyHistory:
    """A history of about `tokens` tokens and its passkey.

    `count_tokens` counts the tokens of an exchange.
    """
    rng = random.Random(f"passkey:{seed}:{tokens}")
    chat = _draw_chat(rng, tokens, count_tokens, language)
    name = language.draw_names(rng)[0]
    attribute = rng.choice(language.attributes)
    fact = Fact(name, attribute, language.draw_value(rng, attribute, set()))
    statement = language.state(rng, fact)
    return PasskeyHistory(
        system={"role": "system", "content": rng.choice(language.system_lines)},
        chat=chat,
        statement=_exchange(statement, language.acknowledge(rng, fact)),
        question=language.ask(rng, fact),
        value=fact.value,
    )


def _draw_chat(
    rng: random.Random,
    tokens: int,
    count_tokens: Callable[[Sequence[Message]], int],
    language: Language,
) -> tuple[tuple[Message, Message], ...]:
    topics = rng.sample(language.topics, min(_TOPICS, len(language.topics)))
    said = list[str]()
    chat = list[tuple[Message, Message]]()
    length = 0
    for number in count():
        if length >= tokens:
            break
        topic = topics[number // _CHATS_ON_A_TOPIC % len(topics)]
        chat.append(_exchange(*language.small_talk(rng, topic, said)))
        length += count_tokens(chat[-1])
    return tuple(chat)


def run(unit: Passkey) -> list[Record]:
    """Append the history and ask, once per depth, each in a session of its own.

    Raises `workers.errors`.
    """
    setup = unit.setup
    tokenizer = harness.load(setup.model).tokenizer
    language = get_language(setup.model, unit.data)
    count_tokens = partial(harness.count_tokens, tokenizer)
    history = build_history(setup.seed, unit.tokens, count_tokens, language)
    records = list[Record]()
    for depth in unit.depths:
        with harness.open_session(setup, history.messages(depth)) as session:
            record = _ask(setup, session, history, language)
            records.append({**record, "tokens": unit.tokens, "depth": depth})
    return records


def _ask(setup: Setup, session: Session, history: PasskeyHistory, language: Language) -> Record:
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
        "right": float(language.is_answer(done.message.content, history.value)),
        "seconds": {"prefill": session.seconds, "answer": time.perf_counter() - started},
    }


def result_rows(records: Sequence[Record], seed: int) -> list[Row]:
    """Each method's accuracy at each length, then at each depth as well, then seconds.

    The value is one of thousands: chance is nothing.
    """
    records, unreported = split_cells(
        records, lambda each: each["arm"] == FULL, ("tokens",), lambda each: 0.0, seed
    )
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
    return [*rows, *unreported]


def _common(config: str, group: Sequence[Record]) -> dict[str, Any]:
    active = max(each["active_rows"] for each in group)
    common = {"method": config, "k": 0, "active_rows": active}
    return common if config == FULL else {**common, "budget": group[0]["rows"]}


def _exchange(user: str, reply: str) -> tuple[Message, Message]:
    return {"role": "user", "content": user}, {"role": "assistant", "content": reply}
