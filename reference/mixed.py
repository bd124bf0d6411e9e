"""Conversations in the mixed language: many forms of statements, questions, answers and results.

The values of the two languages, and their small talk and tools, are the same; so are the answers'
forms. The weights of the forms are `forms.MIXTURE`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from reference.chat import TOPICS, USER_LINES, draw_line, small_talk
from reference.conversation import (
    CLAUSE,
    NOTED,
    QUESTIONS,
    STATEMENTS,
    SYSTEM_LINES,
    Conversation,
    Exchange,
    ToolCall,
    capitalize,
)
from reference.forms import (
    CLAUSES,
    CORRECTION_OPENINGS,
    LIST_ANSWER,
    LIST_QUESTIONS,
    MIXTURE,
    NAMED_LIST_QUESTIONS,
    NEW_CLAUSES,
    Mixture,
    Place,
    draw_scale,
    draw_weighted,
)
from reference.results import long_result
from reference.tools import TOOLS
from reference.words import ATTRIBUTES, Split, draw_names, draw_value, first_piece

# Characters of rendered text per token of the shipped tokenizer, and tokens of a message's marks.
CHARS_PER_TOKEN = 3.1
MARK_TOKENS = 4
# Mean tokens of a sentence in a message.
SENTENCE_TOKENS = 15


@dataclass
class _Fact:
    """A stated fact, with the form and the exchange of its latest statement."""

    name: str
    attribute: str
    value: str
    form: str
    exchange: int
    order: int
    times_stated: int = 1
    times_asked: int = 0
    marked: bool = True


@dataclass
class _Ledger:
    """What was stated so far. `people` has the attributes of each person."""

    facts: dict[tuple[str, str], _Fact] = field(default_factory=dict)
    people: dict[str, set[str]] = field(default_factory=dict)
    first_pieces: set[str] = field(default_factory=set)
    statements: int = 0

    def of_attribute(self, attribute: str) -> list[_Fact]:
        """The facts of an attribute in the order of their latest statements."""
        facts = [each for each in self.facts.values() if each.attribute == attribute]
        return sorted(facts, key=lambda each: each.order)


def generate_mixed(
    seed: int, n_tokens: int, *, split: Split = "held_out", mixture: Mixture = MIXTURE
) -> Conversation:
    """A conversation of at least about `n_tokens` tokens in the mixed language.

    A function of its arguments alone, as `conversation.generate` is.
    """
    rng = random.Random(f"mixed:{split}:{seed}")
    return _MixedWriter(rng, split, mixture, n_tokens).write(seed)


class _MixedWriter:
    """State of a conversation while it is written."""

    def __init__(self, rng: random.Random, split: Split, mixture: Mixture, n_tokens: int) -> None:
        self.rng = rng
        self.split = split
        self.mixture = mixture
        self.n_tokens = n_tokens
        self.names = draw_names(rng, split)
        self.attributes = rng.sample(
            sorted(ATTRIBUTES), rng.choice((1, 2, 3, 4, 6, len(ATTRIBUTES)))
        )
        self.facts_per_person = min(
            len(self.attributes), draw_weighted(rng, mixture.facts_per_person)
        )
        self.topics = rng.sample(sorted(TOPICS), 4)
        self.tools = tuple(rng.sample(TOOLS, rng.randint(2, len(TOOLS))))
        self.longest_text = draw_scale(rng, 60, min(mixture.text_tokens, n_tokens / 2))
        self.statement_share = rng.choice((0.15, 0.3, 0.5, 0.8))
        self.ledger = _Ledger()
        self.exchanges: list[Exchange] = []
        self.said: list[str] = []

    def write(self, seed: int) -> Conversation:
        """Write exchanges until there are enough tokens."""
        tokens = 0.0
        while tokens < self.n_tokens:
            exchange = self._exchange()
            self.exchanges.append(exchange)
            tokens += _estimate_tokens(exchange)
        used = any(each.tool_call is not None for each in self.exchanges)
        tools = [tool.schema() for tool in self.tools] if used else []
        return Conversation(seed, self.rng.choice(SYSTEM_LINES), tools, tuple(self.exchanges))

    def _exchange(self) -> Exchange:
        kind = draw_weighted(self.rng, self.mixture.kinds) if self.ledger.facts else "tell"
        if kind == "chat":
            user, reply = small_talk(self.rng, self.rng.choice(self.topics), self.said)
            return Exchange(user, reply, "chat")
        if kind == "list":
            listed = self._list()
            return listed if listed is not None else self._tell()
        if kind == "tool":
            return self._tool()
        return self._ask() if kind == "ask" else self._tell()

    # Statements

    def _tell(self) -> Exchange:
        """One statement, and sometimes other sentences before and after it."""
        before = [self._sentence() for _ in range(self.rng.choice((0, 0, 0, 1, 2)))]
        statement = self._statement()
        after = [self._sentence() for _ in range(self.rng.choice((0, 0, 0, 1, 2)))]
        return Exchange(" ".join([*before, statement, *after]), self.rng.choice(NOTED), "fact")

    def _sentence(self) -> str:
        """A sentence of a message: a statement, or small talk."""
        if self.rng.random() < self.statement_share:
            return self._statement()
        return draw_line(self.rng, USER_LINES, self.rng.choice(self.topics))

    def _statement(self) -> str:
        """A sentence that states a new fact, or several, or a new value of a known one."""
        if self.ledger.facts and self.rng.random() < self.mixture.corrections:
            return self._correction()
        if self.rng.random() < self.mixture.groups:
            return self._group()
        key = self._new_key()
        return self._correction() if key is None else self._first_statement(*key)

    def _first_statement(self, name: str, attribute: str) -> str:
        form = draw_weighted(self.rng, self.mixture.clauses)
        fact = self._record(name, attribute, form)
        return self._opened(fact, CLAUSES[form])

    def _group(self) -> str:
        """One attribute of several people in one sentence."""
        attribute = self.rng.choice(self.attributes)
        count = self.rng.randint(2, 4)
        names, self.names = self.names[:count], self.names[count:]
        if len(names) < 2:
            return self._correction() if self.ledger.facts else self._statement()
        facts = [self._record(name, attribute, "group") for name in names]
        items = ", ".join(f"{fact.name} {fact.value}" for fact in facts)
        return capitalize(
            self.rng.choice(STATEMENTS).format(clause=f"the {attribute} list says {items}")
        )

    def _correction(self) -> str:
        """A new value of a known fact, in any form; only its place tells if it is unmarked."""
        fact = self.rng.choice(list(self.ledger.facts.values()))
        form = draw_weighted(self.rng, self.mixture.clauses)
        fact.value = self._new_value(fact.attribute)
        fact.form = form
        fact.exchange = len(self.exchanges)
        fact.times_stated += 1
        fact.order = self._next_order()
        fact.marked = self.rng.random() >= self.mixture.unmarked
        if not fact.marked:
            return self._opened(fact, CLAUSES[form])
        clause = NEW_CLAUSES[form].format(
            name=fact.name, attribute=fact.attribute, value=fact.value
        )
        return capitalize(self.rng.choice(CORRECTION_OPENINGS).format(clause=clause))

    def _opened(self, fact: _Fact, clause: str) -> str:
        text = clause.format(name=fact.name, attribute=fact.attribute, value=fact.value)
        return capitalize(self.rng.choice(STATEMENTS).format(clause=text))

    def _new_key(self) -> tuple[str, str] | None:
        """A person and an attribute of which nothing is known; None if there are no more people."""
        open_people = [
            name
            for name, attributes in self.ledger.people.items()
            if len(attributes) < self.facts_per_person
        ]
        if open_people and (not self.names or self.rng.random() < 0.5):
            name = self.rng.choice(open_people)
        elif self.names:
            name = self.names.pop()
        else:
            return None
        known = self.ledger.people.get(name, set())
        return name, self.rng.choice([each for each in self.attributes if each not in known])

    def _record(self, name: str, attribute: str, form: str) -> _Fact:
        value = self._new_value(attribute)
        fact = _Fact(name, attribute, value, form, len(self.exchanges), self._next_order())
        self.ledger.facts[name, attribute] = fact
        self.ledger.people.setdefault(name, set()).add(attribute)
        return fact

    def _next_order(self) -> int:
        self.ledger.statements += 1
        return self.ledger.statements

    def _new_value(self, attribute: str) -> str:
        """A value that begins unlike any other of this conversation, as far as there are any."""
        for _ in range(10):
            value = draw_value(attribute, self.rng, self.split)
            if first_piece(value) not in self.ledger.first_pieces:
                break
        self.ledger.first_pieces.add(first_piece(value))
        return value

    # Questions

    def _ask(self) -> Exchange:
        place = draw_weighted(self.rng, self.mixture.places)
        sentences = self._text() if place != "alone" else []
        own = [each for each in self.ledger.facts.values() if each.exchange == len(self.exchanges)]
        fact = self._fact_to_ask(own)
        question = self.rng.choice(QUESTIONS).format(name=fact.name, attribute=fact.attribute)
        at = self._index(place, len(sentences))
        user = " ".join([*sentences[:at], question, *sentences[at:]])
        forms = (f"question {place}", *self._forms(fact))
        return Exchange(
            user,
            _answer(fact),
            "question",
            answer=fact.value,
            fact_exchange=fact.exchange,
            forms=forms,
        )

    def _text(self) -> list[str]:
        """The sentences around a question: at least two."""
        count = round(draw_scale(self.rng, 2, self.longest_text / SENTENCE_TOKENS))
        return [self._sentence() for _ in range(count)]

    def _index(self, place: Place, n_sentences: int) -> int:
        """Number of the sentences before the question."""
        if place == "first":
            return 0
        return self.rng.randrange(1, n_sentences) if place == "between" else n_sentences

    def _fact_to_ask(self, own: list[_Fact]) -> _Fact:
        """A fact of this message or of any; corrected ones and those seldom asked more often."""
        candidates = own if own and self.rng.random() < 0.4 else list(self.ledger.facts.values())
        if self.rng.random() < 0.3:
            candidates = [each for each in candidates if each.times_stated > 1] or candidates
        fact = min(candidates, key=lambda each: (each.times_asked, self.rng.random()))
        fact.times_asked += 1
        return fact

    def _forms(self, fact: _Fact) -> tuple[str, ...]:
        """Names under which an answer about a fact is counted."""
        forms = [f"statement {fact.form}"]
        if fact.times_stated > 1:
            forms.append("corrected" if fact.marked else "corrected, unmarked")
        if len(self.ledger.people[fact.name]) > 1:
            forms.append("several facts a person")
        return tuple(forms)

    def _list(self) -> Exchange | None:
        """Facts of an attribute in one reply; None if no attribute has as many as are wanted.

        They are those of the people named, in that order, or all in the order of their statements.
        """
        fewest, most = self.mixture.list_items
        named = self.rng.random() < self.mixture.named
        known = map(self.ledger.of_attribute, self.attributes)
        possible = [
            facts for facts in known if fewest <= len(facts) and (named or len(facts) <= most)
        ]
        if not possible:
            return None
        facts = self.rng.choice(possible)
        if named:
            facts = self.rng.sample(facts, self.rng.randint(fewest, min(most, len(facts))))
        questions = NAMED_LIST_QUESTIONS if named else LIST_QUESTIONS
        attribute = facts[0].attribute
        items = tuple(f"{fact.name} {fact.value}" for fact in facts)
        return Exchange(
            self.rng.choice(questions).format(
                attribute=attribute, names=", ".join(fact.name for fact in facts)
            ),
            LIST_ANSWER.format(attribute=attribute, items=", ".join(items)),
            "list",
            answer=", ".join(items),
            fact_exchange=min(fact.exchange for fact in facts),
            items=items,
            forms=("list, named" if named else "list, every",),
        )

    def _tool(self) -> Exchange:
        tool = self.rng.choice(self.tools)
        argument = tool.draw_argument(self.rng)
        fact = self._fact_to_ask([])
        result = {tool.result: fact.name}
        form = "tool"
        if self.rng.random() < self.mixture.long_results:
            others = [name for name in self.ledger.people if name != fact.name]
            most = min(self.mixture.result_tokens, self.n_tokens / 2)
            result = long_result(self.rng, result, draw_scale(self.rng, 60, most), others)
            form = "tool, long result"
        return Exchange(
            self.rng.choice(tool.asks).format(argument=argument, attribute=fact.attribute),
            _answer(fact),
            "tool",
            ToolCall(tool.name, {tool.argument: argument}),
            json.dumps(result),
            fact.value,
            fact.exchange,
            forms=(form, *self._forms(fact)),
        )


def _answer(fact: _Fact) -> str:
    return capitalize(
        CLAUSE.format(name=fact.name, attribute=fact.attribute, value=fact.value) + "."
    )


def _estimate_tokens(exchange: Exchange) -> float:
    """Estimated tokens of a rendered exchange."""
    text = len(exchange.user) + len(exchange.reply)
    if exchange.tool_call is not None:
        text += len(exchange.tool_result or "") + 80
    return text / CHARS_PER_TOKEN + MARK_TOKENS
