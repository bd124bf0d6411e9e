"""A language of cases: facts, questions, small talk, and the test of an answer.

Suites draw their conversations from one. A model answers only a language that it knows: the
reference model its own, any other model plain English.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Fact:
    """A value of a person's attribute."""

    name: str
    attribute: str
    value: str


@dataclass(frozen=True)
class Language:
    """All that a case is written in. Every function draws from the generator it is given.

    - `max_facts`: one fact a person, and so many people.
    - `chat_tokens`, `fact_tokens`: mean tokens of an exchange of small talk, and of one that states
      a fact after a sentence on a topic.
    - `draw_names(rng)`: distinct people in random order.
    - `draw_value(rng, attribute, used)`: a value unlike those before; `used` is added to.
    - `state(rng, fact)`, `correct(rng, fact)`, `acknowledge(rng, fact)`, `ask(rng, fact)`: a statement, one
      that gives a known fact a new value, the reply to either and a question, each a whole message.
    - `worded`: those of `attributes` whose values begin with a letter, which tells values apart by
      their first token.
    - `answer_prefix(fact)`: how a reply that gives a fact begins, up to the value.
    - `closing_cue`: what a message ends with whose question stands before other text; empty: nothing.
    - `statement_span(fact)`: the words of a statement that an answer needs, as they stand in it.
    - `small_talk(rng, topic, said)`: a user's message and a reply, which may refer to the messages
      `said` so far; they are added to it.
    - `line(rng, topic)`: a sentence on a topic.
    - `lead(rng, topic)`: a message on a topic and a reply, which refer to nothing.
    - `is_answer(reply, value)`: whether a generated reply gives the value.
    """

    name: str
    topics: tuple[str, ...]
    attributes: tuple[str, ...]
    worded: tuple[str, ...]
    closing_cue: str
    system_lines: tuple[str, ...]
    max_facts: int
    chat_tokens: int
    fact_tokens: int
    draw_names: Callable[[Random], list[str]]
    draw_value: Callable[[Random, str, set[str]], str]
    state: Callable[[Random, Fact], str]
    correct: Callable[[Random, Fact], str]
    acknowledge: Callable[[Random, Fact], str]
    ask: Callable[[Random, Fact], str]
    answer_prefix: Callable[[Fact], str]
    statement_span: Callable[[Fact], str]
    small_talk: Callable[[Random, str, list[str]], tuple[str, str]]
    line: Callable[[Random, str], str]
    lead: Callable[[Random, str], tuple[str, str]]
    is_answer: Callable[[str, str], bool]


def contains_value(reply: str, value: str) -> bool:
    """True if a reply has `value` in it as whole words, in any case."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", reply, re.IGNORECASE) is not None
