"""A second conversation: it begins as one before it did, and its first message is edited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

from kvrecall.client import KvrecallClient
from kvrecall_server.demo.configs import DemoConfig
from kvrecall_server.demo.conversation import Conversation
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
    recorded = [each for each in conversation.exchanges if each.fact is None][:EXCHANGES]
    asked = next(each for each in conversation.exchanges if each.fact is not None)
    texts = [text for each in recorded for text in (each.user, each.reply)]
    texts[0] = f"{EDIT} {texts[0]}"
    roles = cycle(("user", "assistant"))
    return [
        {"role": "system", "content": conversation.system},
        *(
            {"role": role, "content": text}
            for role, text in zip(roles, [*texts, asked.question], strict=False)
        ),
    ]


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
