"""Generated agent conversations: facts, questions about them, corrections, tool calls, chat.

A conversation is a function of its seed and settings alone. Names and values of the splits "train"
and "held_out" are disjoint.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from reference.chat import TOPICS, USER_LINES, draw_line, small_talk
from reference.tools import TOOLS, ToolKind
from reference.words import ATTRIBUTES, Split, draw_names, draw_value, first_piece

Kind = Literal["chat", "fact", "correction", "question", "tool", "list"]

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a helpful assistant with a good memory.",
    "You are a careful assistant for a busy office.",
    "Answer shortly and use the latest facts.",
)
# One form for every statement and answer, with the value right after the name: recall is induction
# on the name. With "is" between them a model of this size learned in an hour to match the attribute
# alone: 0.43 of the values' first tokens were right where only the name distinguished facts, 0.96
# and more of the third and later ones.
CLAUSE = "the {attribute} list says {name} {value}"
STATEMENTS = (
    "{clause}.",
    "Please note that {clause}.",
    "Remember that {clause}.",
    "For the record, {clause}.",
    "By the way, {clause}.",
    "Before I forget, {clause}.",
    "I just heard that {clause}.",
    "It may matter later that {clause}.",
    "One more thing, {clause}.",
    "You should know that {clause}.",
    "Could you keep in mind that {clause}?",
    "Here is something to remember: {clause}.",
)
CORRECTIONS = (
    "Correction: the {attribute} list now says {name} {value}.",
    "It changed, the {attribute} list now says {name} {value}.",
    "Please update this, the {attribute} list now says {name} {value}.",
    "I was wrong, the {attribute} list now says {name} {value}.",
)
NOTED = ("Noted.", "Got it.", "Understood.", "Okay, I will remember that.", "Thanks, noted.")
QUESTIONS = (
    "What is {name}'s {attribute}?",
    "Do you remember {name}'s {attribute}?",
    "Can you tell me {name}'s {attribute}?",
    "Remind me of {name}'s {attribute}, please.",
    "I need {name}'s {attribute} again.",
    "What is the {attribute} of {name}?",
    "Which {attribute} does {name} have?",
    "What was {name}'s {attribute}?",
    "Tell me {name}'s {attribute} once more.",
    "{name}'s {attribute}, please.",
    "Someone wants to know {name}'s {attribute}.",
    "Which {attribute} did I give you for {name}?",
)

# One fact a person: a split has about so many people whose names share no syllable.
MAX_FACTS = 42
# Mean tokens of an exchange of each kind, rendered, under the shipped tokenizer.
EXCHANGE_TOKENS = {"chat": 43, "fact": 26, "correction": 24, "question": 23, "tool": 61}


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the assistant is expected to make."""

    name: str
    arguments: dict[str, str]


@dataclass(frozen=True)
class Exchange:
    """A user message and all that follows until the assistant's final text.

    `reply` is the assistant's text, after a tool call its final answer. `tool_result` is JSON text.
    `answer` is the value that must be in the reply. `fact_exchange` is the index of the exchange
    that stated the fact asked for: its latest correction if there is one. It may be the question's
    own in the mixed language, where a message states facts and asks. `items` are a list's answers
    (name and value); `forms` the names under which an answer is counted in the scores by form.
    """

    user: str
    reply: str
    kind: Kind
    tool_call: ToolCall | None = None
    tool_result: str | None = None
    answer: str | None = None
    fact_exchange: int | None = None
    items: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()

    @property
    def learned_text(self) -> str:
        """End of the reply that training weights as the answer: the value, with its full stop.

        It is the whole reply for a list, and where the question does not stand right before it:
        attribute and name are then part of what has to be found.
        """
        if not self.forms or {"question alone", "question last"}.intersection(self.forms):
            return f" {self.answer}."
        return self.reply

    def is_answered_by(self, reply: str) -> bool:
        """True if a generated reply ends in exactly this exchange's answer, a list in any order."""
        if self.items:
            return sorted(listed_items(reply)) == sorted(self.items)
        return self.answer is None or ends_in(reply, self.answer)


@dataclass(frozen=True)
class Conversation:
    """A whole conversation with the expected replies and calls of the assistant."""

    seed: int
    system: str
    tools: list[dict[str, Any]]
    exchanges: tuple[Exchange, ...]

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as OpenAI-style messages, with the expected replies."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}]
        for index, exchange in enumerate(self.exchanges):
            messages.extend(exchange_messages(exchange, call_id=f"call_{index}"))
        return messages


def exchange_messages(exchange: Exchange, call_id: str) -> list[dict[str, Any]]:
    """One exchange as OpenAI-style messages."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": exchange.user}]
    if exchange.tool_call is not None:
        function = {
            "name": exchange.tool_call.name,
            "arguments": json.dumps(exchange.tool_call.arguments),
        }
        call = {"id": call_id, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": exchange.tool_result, "tool_call_id": call_id})
    messages.append({"role": "assistant", "content": exchange.reply})
    return messages


@dataclass(frozen=True)
class Mix:
    """Numbers of exchanges of each kind in a conversation.

    `restate` is the share of acknowledgements that repeat the fact. `attributes` is the number of
    attributes of its facts: the fewer, the more often only the name distinguishes facts.
    """

    facts: int
    corrections: int
    questions: int
    tool_questions: int
    chats: int
    restate: float = 0.15
    attributes: int = len(ATTRIBUTES)


@dataclass
class _Fact:
    """A stated fact. `stated_at` is the number of tokens before the statement."""

    name: str
    attribute: str
    value: str
    exchange: int
    stated_at: float
    times_asked: int = 0
    corrected: bool = False


def mix_for(n_tokens: int, n_facts: int | None = None) -> Mix:
    """The mix for evaluation: one fact per 150 tokens, one question per 75, and small talk."""
    facts = n_facts if n_facts is not None else min(MAX_FACTS, max(2, n_tokens // 150))
    corrections = facts // 6
    questions = max(2, n_tokens // 75)
    tool_questions = questions // 4
    used = (
        facts * EXCHANGE_TOKENS["fact"]
        + corrections * EXCHANGE_TOKENS["correction"]
        + (questions - tool_questions) * EXCHANGE_TOKENS["question"]
        + tool_questions * EXCHANGE_TOKENS["tool"]
    )
    chats = max(0, round((n_tokens - used) / EXCHANGE_TOKENS["chat"]))
    return Mix(facts, corrections, questions - tool_questions, tool_questions, chats)


def generate(
    seed: int,
    n_tokens: int,
    *,
    n_facts: int | None = None,
    split: Split = "held_out",
    mix: Mix | None = None,
) -> Conversation:
    """A conversation of about `n_tokens` tokens under the shipped tokenizer.

    Facts occur everywhere, more of them early; questions, more of them late, ask for facts at ages
    spread as evenly as the facts allow. `mix` sets the number of exchanges of each kind instead of
    `n_tokens` and `n_facts`. Raises ValueError for more facts than there are names.
    """
    return _Writer(random.Random(f"{split}:{seed}"), split).write(
        seed, mix or mix_for(n_tokens, n_facts)
    )


class _Writer:
    """State of a conversation while it is written.

    `first_pieces` are the beginnings of the values so far. `ages` counts questions by the age of
    their fact, in eighths of the conversation.
    """

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split = split
        self.names = draw_names(rng, split)
        self.first_pieces: set[str] = set()
        self.facts: dict[tuple[str, str], _Fact] = {}
        self.exchanges: list[Exchange] = []
        self.topics = rng.sample(sorted(TOPICS), 4)
        self.topic = self.topics[0]
        self.sentences: list[str] = []
        self.tokens = 0.0
        self.total = 1.0
        self.ages = [0.0] * 8
        self.tools: tuple[ToolKind, ...] = TOOLS
        self.attributes = sorted(ATTRIBUTES)

    def write(self, seed: int, mix: Mix) -> Conversation:
        """Write the conversation of a mix."""
        self.total = _expected_tokens(mix)
        self.attributes = self.rng.sample(self.attributes, mix.attributes)
        if mix.tool_questions:
            self.tools = tuple(self.rng.sample(TOOLS, self.rng.randint(2, len(TOOLS))))
        for kind in self._plan(mix):
            exchange = self._exchange(kind, mix.restate)
            self.exchanges.append(exchange)
            self.tokens += EXCHANGE_TOKENS[exchange.kind]
        tools = [tool.schema() for tool in self.tools] if mix.tool_questions else []
        return Conversation(seed, self.rng.choice(SYSTEM_LINES), tools, tuple(self.exchanges))

    def _plan(self, mix: Mix) -> list[Kind]:
        """Kinds of the exchanges in order: a fact first, corrections and questions rather late."""
        rng = self.rng
        moments: list[tuple[float, Kind]] = [(-1.0, "fact")]
        moments += [(rng.random() ** 1.4, "fact") for _ in range(mix.facts - 1)]
        moments += [(0.2 + 0.7 * rng.random(), "correction") for _ in range(mix.corrections)]
        moments += [(rng.random() ** 0.6, "question") for _ in range(mix.questions)]
        moments += [(rng.random() ** 0.6, "tool") for _ in range(mix.tool_questions)]
        moments += [(rng.random(), "chat") for _ in range(mix.chats)]
        return [kind for _, kind in sorted(moments)]

    def _exchange(self, kind: Kind, restate: float) -> Exchange:
        if kind == "chat":
            return self._chat()
        if kind == "fact":
            return self._fact(restate)
        if kind == "correction":
            return self._correction(restate)
        fact = self._fact_to_ask()
        return self._question(fact) if kind == "question" else self._tool(fact)

    def _chat(self) -> Exchange:
        if self.rng.random() < 0.35:
            self.topic = self.rng.choice(self.topics)
        user, reply = small_talk(self.rng, self.topic, self.sentences)
        return Exchange(user, reply, "chat")

    def _new_key(self) -> tuple[str, str]:
        """A new person and an attribute: one fact a person, so that names distinguish facts."""
        if not self.names:
            raise ValueError(
                f"no room for another fact after {len(self.facts)}: ask for fewer facts"
            )
        return self.names.pop(), self.rng.choice(self.attributes)

    def _new_value(self, attribute: str) -> str:
        """A value that begins unlike any other of this conversation, as far as there are any."""
        for _ in range(20):
            value = draw_value(attribute, self.rng, self.split)
            if first_piece(value) not in self.first_pieces:
                break
        self.first_pieces.add(first_piece(value))
        return value

    def _fact(self, restate: float) -> Exchange:
        name, attribute = self._new_key()
        value = self._new_value(attribute)
        self.facts[name, attribute] = _Fact(
            name, attribute, value, len(self.exchanges), self.tokens
        )
        clause = CLAUSE.format(name=name, attribute=attribute, value=value)
        user = self._with_small_talk(self.rng.choice(STATEMENTS).format(clause=clause))
        return Exchange(user, self._noted(name, attribute, "says", value, restate), "fact")

    def _with_small_talk(self, statement: str) -> str:
        """A statement as a message, sometimes with small talk before or after it."""
        user = capitalize(statement)
        draw = self.rng.random()
        if draw > 0.2:
            return user
        other = draw_line(self.rng, USER_LINES, self.topic)
        return f"{other} {user}" if draw > 0.1 else f"{user} {other}"

    def _correction(self, restate: float) -> Exchange:
        """A new value for a known fact; a new fact if all were corrected already."""
        open_facts = [fact for fact in self.facts.values() if not fact.corrected]
        if not open_facts:
            return self._fact(restate)
        fact = self.rng.choice(open_facts)
        fact.value = self._new_value(fact.attribute)
        fact.exchange = len(self.exchanges)
        fact.stated_at = self.tokens
        fact.corrected = True
        user = self.rng.choice(CORRECTIONS).format(
            name=fact.name, attribute=fact.attribute, value=fact.value
        )
        reply = self._noted(fact.name, fact.attribute, "now says", fact.value, restate)
        return Exchange(user, reply, "correction")

    def _noted(self, name: str, attribute: str, verb: str, value: str, restate: float) -> str:
        if self.rng.random() < restate:
            return f"Noted, the {attribute} list {verb} {name} {value}."
        return self.rng.choice(NOTED)

    def _fact_to_ask(self) -> _Fact:
        """The fact that was asked for least among those of the age asked for least."""
        by_age: dict[int, list[_Fact]] = {}
        for fact in self.facts.values():
            age = min(7, int(8 * (self.tokens - fact.stated_at) / self.total))
            by_age.setdefault(age, []).append(fact)
        age = min(by_age, key=lambda each: (self.ages[each], self.rng.random()))
        self.ages[age] += 1
        fact = min(by_age[age], key=lambda each: (each.times_asked, self.rng.random()))
        fact.times_asked += 1
        return fact

    def _question(self, fact: _Fact) -> Exchange:
        user = self.rng.choice(QUESTIONS).format(name=fact.name, attribute=fact.attribute)
        return self._answering(fact, user, "question", None, None)

    def _tool(self, fact: _Fact) -> Exchange:
        tool = self.rng.choice(self.tools)
        argument = tool.draw_argument(self.rng)
        user = self.rng.choice(tool.asks).format(argument=argument, attribute=fact.attribute)
        call = ToolCall(tool.name, {tool.argument: argument})
        return self._answering(fact, user, "tool", call, json.dumps({tool.result: fact.name}))

    def _answering(
        self, fact: _Fact, user: str, kind: Kind, call: ToolCall | None, result: str | None
    ) -> Exchange:
        reply = capitalize(
            CLAUSE.format(name=fact.name, attribute=fact.attribute, value=fact.value) + "."
        )
        return Exchange(user, reply, kind, call, result, fact.value, fact.exchange)


def ends_in(reply: str, value: str) -> bool:
    """True if a reply ends in exactly `value`, with or without a full stop."""
    return reply.strip().rstrip(".").endswith(" " + value)


def listed_items(reply: str) -> list[str]:
    """Items of a reply that lists, each a name and a value; empty if it is no list."""
    _, says, items = reply.strip().rstrip(".").partition(" list says ")
    return items.split(", ") if says else []


def capitalize(text: str) -> str:
    """Nonempty text with a capital first letter; the rest is unchanged."""
    return text[0].upper() + text[1:]


def _expected_tokens(mix: Mix) -> float:
    """Expected number of tokens of a mix."""
    counts = {
        "chat": mix.chats,
        "fact": mix.facts,
        "correction": mix.corrections,
        "question": mix.questions,
        "tool": mix.tool_questions,
    }
    return float(max(1, sum(EXCHANGE_TOKENS[kind] * count for kind, count in counts.items())))
