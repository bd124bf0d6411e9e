"""The session of an agent: facts early, tool calls with long results, questions about facts later.

A function of its seed, in the language that the model answers (`evals.languages`). Tool calls are
recorded; every turn ends in a user's message that the model replies to.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from evals.languages.base import Fact, Language

Message = dict[str, Any]

# Characters of a token of English, for the length of tool results.
_TOKEN_CHARACTERS = 5.0
# Tokens of the chat template around the five messages of a turn, with a call in the form that tools have.
_TEMPLATE_TOKENS = 60
_CHECK = "Let me read the messages of {name}."
_REQUEST = "Please read the messages of {name}."
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "read_messages",
            "description": "Messages that a person has written.",
            "parameters": {
                "type": "object",
                "properties": {"person": {"type": "string"}},
                "required": ["person"],
            },
        },
    },
)


@dataclass(frozen=True)
class Turn:
    """A user's message with a recorded tool call, its result, and the message to be replied to.

    Attributes:
        user: Message before the call; empty in a turn without one, which has only `ask`.
        call: The assistant's words beside the call.
        person: Argument of the call.
        result: Text of the tool's result.
        ask: The user's message that the model replies to.
        answer: Value that the reply must contain.
        age: Turns since the fact was stated.
    """

    user: str
    call: str
    person: str
    result: str
    ask: str
    answer: str
    age: int

    @property
    def has_call(self) -> bool:
        """True for a turn with a tool call and a pause."""
        return bool(self.user)


@dataclass(frozen=True)
class Conversation:
    """The turns of a session, and one more after them, asked without a tool: `last`."""

    system: str
    turns: tuple[Turn, ...]
    last: Turn


def call_messages(turn: Turn, call_id: str) -> list[Message]:
    """Messages up to the tool's pause: the user's and the assistant's with the call."""
    function = {"name": "read_messages", "arguments": json.dumps({"person": turn.person})}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "user", "content": turn.user},
        {"role": "assistant", "content": turn.call, "tool_calls": [call]},
    ]


def result_message(turn: Turn, call_id: str) -> Message:
    """The tool's result."""
    return {"role": "tool", "content": turn.result, "tool_call_id": call_id}


def ask_message(turn: Turn) -> Message:
    """The message that the model replies to."""
    return {"role": "user", "content": turn.ask}


def generate(
    language: Language, seed: int, turns: int, tokens: int, reply_tokens: int
) -> Conversation:
    """A session of `turns` turns and about `tokens` tokens, replies of `reply_tokens` included.

    The first turns state a fact each, of different people and attributes, and ask for the one
    before; later turns ask for all of them in random order, again and again. A tool's result
    mentions the person who is asked for, not the fact. Raises ValueError for fewer than two turns.
    """
    if turns < 2:
        raise ValueError("a session has at least two turns: one that states facts, one that asks")
    return _Writer(language, random.Random(f"peers:{seed}"), turns, tokens, reply_tokens).write()


class _Writer:
    """State of a conversation while it is written.

    Attributes:
        facts: By the turn of their statement.
        waiting: Facts to ask for, last first, before any is asked for again.
    """

    def __init__(
        self, language: Language, rng: random.Random, turns: int, tokens: int, reply_tokens: int
    ) -> None:
        self.language = language
        self.rng = rng
        self.turns = turns
        room = tokens / turns - reply_tokens - _TEMPLATE_TOKENS
        self.turn_characters = int(room * _TOKEN_CHARACTERS)
        self.said: list[str] = []
        self.facts = self._draw_facts()
        self.waiting: list[int] = []

    def write(self) -> Conversation:
        """All turns, and the last question."""
        system = self.rng.choice(self.language.system_lines)
        turns = tuple(self._turn(number) for number in range(self.turns))
        stated, fact = self._choose(self.turns)
        ask = self.language.ask(self.rng, fact)
        return Conversation(
            system, turns, Turn("", "", "", "", ask, fact.value, self.turns - stated)
        )

    def _draw_facts(self) -> list[Fact]:
        names = self.language.draw_names(self.rng)
        attributes = self.rng.sample(self.language.attributes, len(self.language.attributes))
        used: set[str] = set()
        return [
            Fact(name, attribute, self.language.draw_value(self.rng, attribute, used))
            for name, attribute in zip(names, attributes[: self.turns], strict=False)
        ]

    def _turn(self, number: int) -> Turn:
        stated = self.facts[number : number + 1]
        asked, fact = self._choose(number)
        user = [self.language.state(self.rng, each) for each in stated]
        user += [self._talk()[0], _REQUEST.format(name=fact.name)]
        call = [self.language.acknowledge(self.rng, each) for each in stated]
        call += [_CHECK.format(name=fact.name)]
        ask = self.language.ask(self.rng, fact)
        used = sum(len(text) + 1 for text in (*user, *call, ask))
        result = self._result(fact.name, self.turn_characters - used)
        return Turn(
            " ".join(user), " ".join(call), fact.name, result, ask, fact.value, number - asked
        )

    def _choose(self, number: int) -> tuple[int, Fact]:
        """The fact that a turn asks for, with the turn of its statement."""
        if number < len(self.facts):
            chosen = max(0, number - 1)
        else:
            self.waiting = self.waiting or self.rng.sample(range(len(self.facts)), len(self.facts))
            chosen = self.waiting.pop()
        return chosen, self.facts[chosen]

    def _talk(self) -> tuple[str, str]:
        return self.language.small_talk(self.rng, self.rng.choice(self.language.topics), self.said)

    def _result(self, person: str, characters: int) -> str:
        """Messages of a person, of at most so many characters where that is one message or more."""
        lines = [f"Messages of {person}:", f"1. {' '.join(self._talk())}"]
        while True:
            line = f"{len(lines)}. {' '.join(self._talk())}"
            if sum(len(each) + 1 for each in (*lines, line)) > characters:
                return "\n".join(lines)
            lines.append(line)
