"""A generated conversation in English for a small LLM: facts, tools, questions, small talk.

The form of a fact is one that SmolLM2-135M-Instruct can recall with a full cache: a statement that
says its value twice, a reply that says it again, many attributes, so that few facts are alike, and a
question some hundred tokens later. Everything is drawn from the seed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random

from evals.languages.base import Fact
from evals.languages.english import ENGLISH
from kvrecall_server.demo.conversation import Conversation, Exchange, RecordedCall

_REPLY_TOKENS = 18
_STATEMENT = "The {attribute} of {name} is {value}. Remember it: {value}."
# Share of the system prompt, which is as long as an agent's.
_SYSTEM_SHARE = 0.3
# Tokens of the conversation per fact, each of which is asked for once. Answers take most of the demo's time.
_TOKENS_PER_FACT = 380
_LEAST_FACTS = 3
# Tokens between a statement and its question: beyond the budget, and within what the model recalls
# with a full cache. A share of the whole in short conversations.
_AGES = (400, 1200)
_AGE_SHARES = (1 / 8, 1 / 3)
# Share of the questions that follow a tool's result.
_TOOL_SHARE = 1 / 3
# For estimates of lengths: characters of a token, and tokens of the template around a message.
_CHARACTERS = 4.1
_TEMPLATE_TOKENS = 5
_LETTERS = "BCDFGHJKLMNPRSTVWXZ"
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_PLACES = ("the archive", "the garage", "the library", "the north gate", "the workshop")


def _digits(count: int) -> Callable[[Random], str]:
    return lambda rng: str(rng.randrange(10 ** (count - 1), 10**count))


def _letters_and_digits(letters: int, digits: int, between: str) -> Callable[[Random], str]:
    return lambda rng: "".join(rng.sample(_LETTERS, letters)) + between + _digits(digits)(rng)


def _seat(rng: Random) -> str:
    return f"{rng.randrange(10, 60)}{rng.choice('ABCDEF')}"


# Attributes beside those of the evals' language.
_ATTRIBUTES: Mapping[str, Callable[[Random], str]] = {
    "customer number": _digits(5),
    "desk number": _digits(3),
    "flight number": _letters_and_digits(2, 4, ""),
    "gate code": _digits(4),
    "invoice number": _digits(5),
    "license plate": _letters_and_digits(2, 4, " "),
    "order number": _digits(5),
    "parking spot": _digits(3),
    "room number": _digits(3),
    "seat number": _seat,
}


@dataclass(frozen=True)
class _Tool:
    """A tool that names a person; `request` is the user's message, `key` the person's in a result."""

    name: str
    request: str
    key: str


_TOOLS = (
    _Tool("duty_roster", "Please look up who is on duty at {place} on {day}.", "on_duty"),
    _Tool("visitor_list", "Please check which visitor comes to {place} on {day}.", "visitor"),
    _Tool("key_log", "Please check who has the key of {place} since {day}.", "holder"),
)


def generate_english(seed: int, tokens: int) -> Conversation:
    """A conversation of at least about `tokens` tokens, with a question for each of its facts."""
    return _Writer(Random(f"demo:{seed}"), tokens).write(seed)


@dataclass(frozen=True)
class _Asked:
    """A stated fact that is asked for when the conversation has `due` tokens."""

    due: float
    fact: Fact
    exchange: int
    after_tool: bool


@dataclass
class _Writer:
    """State of a conversation while it is written; `length` is its estimate in tokens."""

    rng: Random
    tokens: int
    length: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    waiting: list[_Asked] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def write(self, seed: int) -> Conversation:
        """Write all exchanges: what is due first, else small talk."""
        system = self._write_system()
        self.length = _count_tokens(system)
        facts = self._draw_facts()
        last = self.tokens - self._ages[1]
        moments = sorted(self.rng.uniform(self.length, last) for _ in facts)
        tools = set(self.rng.sample(range(len(facts)), int(len(facts) * _TOOL_SHARE)))
        stated = 0
        while stated < len(facts) or self.waiting or self.length < self.tokens:
            asked = min(self.waiting, key=lambda each: each.due, default=None)
            if asked is not None and asked.due <= self.length:
                self.waiting.remove(asked)
                self._ask(asked)
            elif stated < len(facts) and moments[stated] <= self.length:
                self._state(facts[stated], after_tool=stated in tools)
                stated += 1
            else:
                topic = self.rng.choice(ENGLISH.topics)
                self._add(Exchange(*ENGLISH.small_talk(self.rng, topic, self.said)))
        return Conversation(seed, system, (), tuple(self.exchanges), _REPLY_TOKENS)

    def _write_system(self) -> str:
        """A system prompt with examples of answers. No fact is in it that a question asks for."""
        text = f"{self.rng.choice(ENGLISH.system_lines)} Answer in the tone of these examples."
        while _count_tokens(text) < _SYSTEM_SHARE * self.tokens:
            said, answer = ENGLISH.lead(self.rng, self.rng.choice(ENGLISH.topics))
            text += f'\nTo "{said}" you answer: "{answer}"'
        return text

    @property
    def _ages(self) -> tuple[float, float]:
        """Least and most tokens between a statement and its question."""
        least, most = (
            min(age, share * self.tokens) for age, share in zip(_AGES, _AGE_SHARES, strict=True)
        )
        return least, most

    def _draw_facts(self) -> list[Fact]:
        """One fact a person. Every attribute is used before one is used again."""
        count = max(_LEAST_FACTS, min(ENGLISH.max_facts, self.tokens // _TOKENS_PER_FACT))
        attributes = sorted({*_ATTRIBUTES, *ENGLISH.attributes})
        drawn: list[str] = []
        while len(drawn) < count:
            drawn += self.rng.sample(attributes, len(attributes))
        used: set[str] = set()
        names = ENGLISH.draw_names(self.rng)
        return [
            Fact(name, attribute, self._draw_value(attribute, used))
            for name, attribute in zip(names[:count], drawn, strict=False)
        ]

    def _draw_value(self, attribute: str, used: set[str]) -> str:
        """A value that is not among `used`, to which it is added."""
        if attribute not in _ATTRIBUTES:
            return ENGLISH.draw_value(self.rng, attribute, used)
        while (value := _ATTRIBUTES[attribute](self.rng)) in used:
            pass
        used.add(value)
        return value

    def _state(self, fact: Fact, *, after_tool: bool) -> None:
        line = ENGLISH.line(self.rng, self.rng.choice(ENGLISH.topics))
        statement = _STATEMENT.format(**vars(fact))
        due = self.length + self.rng.uniform(*self._ages)
        self.waiting.append(_Asked(due, fact, len(self.exchanges), after_tool))
        self._add(Exchange(f"{line} {statement}", ENGLISH.acknowledge(self.rng, fact)))

    def _ask(self, asked: _Asked) -> None:
        fact = asked.fact
        question = ENGLISH.ask(self.rng, fact)
        expected = f"The {fact.attribute} of {fact.name} is {fact.value}."
        is_right = partial(_gives, fact.value)
        if not asked.after_tool:
            self._add(Exchange(question, expected, asked.exchange, is_right))
            return
        request, call = self._call_tool(fact.name, question)
        self._add(Exchange(request, expected, asked.exchange, is_right, recorded_call=call))

    def _call_tool(self, name: str, question: str) -> tuple[str, RecordedCall]:
        """The user's request, and a recorded call whose result names the person."""
        rng = self.rng
        tool = rng.choice(_TOOLS)
        asked = {"place": rng.choice(_PLACES), "day": rng.choice(_DAYS)}
        hour = rng.randrange(7, 15)
        result = asked | {"from": f"{hour}:00", "until": f"{hour + 4}:00", tool.key: name}
        call = RecordedCall(tool.name, json.dumps(asked), json.dumps(result), question)
        return tool.request.format(**asked), call

    def _add(self, exchange: Exchange) -> None:
        call = exchange.recorded_call
        texts = [exchange.user, exchange.reply]
        texts += [call.result, call.question] if call else []
        self.exchanges.append(exchange)
        self.length += sum(map(_count_tokens, texts))


def _count_tokens(text: str) -> int:
    """Estimate the tokens of a message."""
    return round(len(text) / _CHARACTERS) + _TEMPLATE_TOKENS


def _gives(value: str, reply: str) -> bool:
    return ENGLISH.is_answer(reply, value)
