"""A second conversation: it begins as one before it did, and its first message is edited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from kvrecall.client import KvrecallClient
from kvrecall_server.demo.configs import DemoConfig
from kvrecall_server.demo.conversation import Conversation, Exchange
from kvrecall_server.reporting.results import Row, speed_row

EDIT = "Good morning."
# Exchanges of it before its question.
EXCHANGES = 3
SHARED = "second conversation"
ALONE = "second conversation with a cache_salt"


@dataclass(frozen=True)
class FirstToken:
    """Cost of a first token in seconds, with the prompt's tokens and those that were cached."""

    seconds: float
    prompt: int
    cached: int


@dataclass(frozen=True)
class SecondConversation:
    """The same request twice: with rows of sessions before it, and under a salt that shares none."""

    shared: FirstToken
    alone: FirstToken


def ask_second(
    client: KvrecallClient, config: DemoConfig, conversation: Conversation
) -> SecondConversation:
    """Begin the conversation again, with an edited message.

    A session of the conversation has to exist. The two new ones have the configuration's settings and
    are deleted. Raises KvrecallError.
    """
    messages = edited_messages(conversation)
    ask = partial(_ask, client, config, conversation.tools, messages)
    return SecondConversation(ask(None), ask(f"demo {conversation.seed}"))


def edited_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The system prompt, the first exchanges, of which the first begins with `EDIT`, and a question."""
    first, *others = [each for each in conversation.exchanges if each.fact is None][:EXCHANGES]
    asked = next(each for each in conversation.exchanges if each.fact is not None)
    texts = [
        ("system", conversation.system),
        ("user", f"{EDIT} {first.user}"),
        ("assistant", first.reply),
        *((role, text) for each in others for role, text in _list_texts(each)),
        ("user", asked.question),
    ]
    return [{"role": role, "content": text} for role, text in texts]


def _list_texts(exchange: Exchange) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("user", exchange.user), ("assistant", exchange.reply)


def _ask(
    client: KvrecallClient,
    config: DemoConfig,
    tools: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    salt: str | None,
) -> FirstToken:
    options = config.options
    options["tools"] = tools
    options["cache_salt"] = salt
    with client.session(**options) as session:
        turn = client.turn(session, messages, max_tokens=1, temperature=0)
        (logged,) = client.inspect.turns(session).turns
    cached = logged.prompt_tokens - logged.prefilled_tokens
    return FirstToken(turn.seconds_to_first_token, logged.prompt_tokens, cached)


def second_rows(asked: Sequence[SecondConversation]) -> list[Row]:
    """Rows of the result file: first tokens, and the tokens that were cached."""
    rows = []
    for name, tokens in _list_tokens(asked).items():
        medians = _take_medians(tokens)
        rows.append(
            speed_row(
                name,
                "time to first token",
                "seconds",
                [each.seconds for each in tokens],
                prompt_tokens=medians.prompt,
                cached_tokens=medians.cached,
            )
        )
    return rows


def second_lines(asked: Sequence[SecondConversation]) -> tuple[str, str]:
    """Two sentences: what the second conversation cost, and what it costs without sharing."""
    shared, alone = map(_take_medians, _list_tokens(asked).values())
    return (
        f"A second conversation with the same system prompt and an edited message: {shared.cached:,} "
        f"of its {shared.prompt:,} tokens cached, first token after {shared.seconds:.2f} s.",
        f"Under a cache_salt of its own, which shares nothing: {alone.cached:,} tokens cached, first "
        f"token after {alone.seconds:.2f} s (n={len(asked)}).",
    )


def _list_tokens(asked: Sequence[SecondConversation]) -> dict[str, list[FirstToken]]:
    return {SHARED: [each.shared for each in asked], ALONE: [each.alone for each in asked]}


def _take_medians(tokens: Sequence[FirstToken]) -> FirstToken:
    """Medians of each measure."""
    return FirstToken(
        median(each.seconds for each in tokens),
        round(median(each.prompt for each in tokens)),
        round(median(each.cached for each in tokens)),
    )
