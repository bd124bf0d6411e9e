"""Training batches: token ids of conversations, classes of tokens, and positions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from reference.chat import TOPICS, USER_LINES, draw_line
from reference.conversation import (
    MAX_FACTS,
    Conversation,
    Exchange,
    Mix,
    capitalize,
    exchange_messages,
    generate,
)
from reference.forms import CLAUSES, MIXTURE, NAMED_LIST_QUESTIONS, draw_weighted
from reference.mixed import generate_mixed
from reference.words import ATTRIBUTES, draw_names, draw_value

# Classes of a predicted token: not trained on, language modelling, part of an answer's value.
IGNORED = 0
ORDINARY = 1
ANSWER = 2

# An answer: the first index and the end of its tokens, the names under which it is counted, and the
# age of its fact in tokens.
Answer = tuple[int, int, tuple[str, ...], int]


@dataclass
class TokenRow:
    """One sequence under construction; `starts` are the indices at which an exchange starts."""

    ids: list[int]
    classes: list[int]
    starts: list[int]
    answers: list[Answer]


@dataclass(frozen=True)
class Batch:
    """Tensors int64 `[rows, tokens]`, and the answers of each row."""

    ids: torch.Tensor
    positions: torch.Tensor
    classes: torch.Tensor
    answers: list[list[Answer]]


def encode_conversation(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase, limit: int
) -> TokenRow:
    """Token ids of a conversation's rendered text, up to about `limit` tokens."""
    row = TokenRow([], [], [], [])
    _append(row, render_opening(conversation), tokenizer)
    stated_at: list[int] = []
    for exchange in conversation.exchanges:
        stated_at.append(len(row.ids))
        row.starts.append(len(row.ids))
        _append_exchange(row, exchange, tokenizer, stated_at)
        if len(row.ids) > limit:
            break
    return row


def _append(row: TokenRow, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    row.ids.extend(ids)
    row.classes.extend([ORDINARY] * len(ids))


def _append_exchange(
    row: TokenRow, exchange: Exchange, tokenizer: PreTrainedTokenizerBase, stated_at: list[int]
) -> None:
    """Append an exchange; what is learned of an answer is the end of its reply."""
    _append(row, render_exchange(exchange), tokenizer)
    if exchange.answer is None or exchange.fact_exchange is None:
        return
    end = len(row.ids) - 1
    start = end - len(tokenizer.encode(exchange.learned_text, add_special_tokens=False))
    row.classes[start:end] = [ANSWER] * (end - start)
    kinds = exchange.forms or (exchange.kind,)
    row.answers.append((start, end, kinds, start - stated_at[exchange.fact_exchange]))


def render_opening(conversation: Conversation) -> str:
    """The system message as the chat template renders it."""
    offered = []
    for tool in conversation.tools:
        function = tool["function"]
        offered.append(f"{function['name']}({', '.join(function['parameters']['properties'])})")
    tools = f" Tools: {', '.join(offered)}." if offered else ""
    return f"<|system|>{conversation.system}{tools}<|end|>"


def render_exchange(exchange: Exchange) -> str:
    """An exchange as the chat template renders it; a test compares the two."""
    parts = [f"<|user|>{exchange.user}<|end|>"]
    if exchange.tool_call is not None:
        function = exchange_messages(exchange, "")[1]["tool_calls"][0]["function"]
        call = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
        parts.append(
            f"<|assistant|><tool_call>{call}</tool_call><|end|>"
            f"<|tool|>{exchange.tool_result}<|end|>"
        )
    parts.append(f"<|assistant|>{exchange.reply}<|end|>")
    return "".join(parts)


def training_mix(n_tokens: int, rng: random.Random) -> Mix:
    """A random mix of a little over `n_tokens` tokens, dense in questions."""
    room = n_tokens * 1.1
    chats = int(room * rng.choice((0.0, 0.1, 0.2, 0.4)) / 47)
    room -= 47 * chats
    tool_questions = int(room * rng.choice((0.0, 0.2, 0.4)) / 60)
    room -= 60 * tool_questions + 30 * bool(tool_questions)
    pairs = max(2, int(room / 22))
    attributes = rng.choice((1, 2, 4, len(ATTRIBUTES), len(ATTRIBUTES)))
    facts = max(1, min(MAX_FACTS, int(pairs * rng.uniform(0.25, 0.55))))
    corrections = int(facts * rng.choice((0.0, 0.15, 0.3)))
    questions = max(1, pairs - facts - corrections)
    return Mix(
        facts,
        corrections,
        questions,
        tool_questions,
        chats,
        restate=rng.choice((0.0, 0.2, 0.5)),
        attributes=attributes,
    )


def stretched_positions(
    n_tokens: int, starts: list[int], span: int, rng: random.Random
) -> list[int]:
    """Positions of `n_tokens` tokens that cover `span` positions.

    They jump forward at random starts of exchanges.
    """
    inside = [start for start in starts if start < n_tokens]
    cuts = sorted(rng.sample(inside, min(len(inside), rng.randint(1, 12))))
    shares = [rng.random() ** 2 for _ in cuts]
    total = sum(shares) or 1.0
    gaps = dict(
        zip(cuts, (int((span - n_tokens) * share / total) for share in shares), strict=True)
    )
    positions = []
    offset = 0
    for index in range(n_tokens):
        offset += gaps.get(index, 0)
        positions.append(index + offset)
    return positions


@dataclass(frozen=True)
class Shares:
    """Shares of the sequences of a batch.

    - `stretched`: with jumping positions; `drills`: repeated random tokens.
    - `lists`: of the others, bare facts that are stated and repeated.
    - `mixed`: of conversations and lists, those in the mixed language.
    - `listings`: of the lists in the mixed language, those that repeat all facts of an attribute.
    """

    stretched: float
    drills: float
    lists: float
    mixed: float
    listings: float


class BatchMaker:
    """Endless training batches, a function of the seed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    def make(self, rows: int, n_tokens: int, longest: int, shares: Shares) -> Batch:
        """A batch of `rows` sequences of `n_tokens` tokens; stretched, one covers up to `longest`."""
        sequences = [self._row(n_tokens, longest, shares) for _ in range(rows)]
        ids, positions, classes = (
            torch.tensor([row[part] for row in sequences]) for part in range(3)
        )
        return Batch(ids, positions, classes, [row[3] for row in sequences])

    def _row(
        self, n_tokens: int, longest: int, shares: Shares
    ) -> tuple[list[int], list[int], list[int], list[Answer]]:
        if self.rng.random() < shares.drills:
            return self._drill(n_tokens)
        listed = self.rng.random() < shares.lists
        mixed = self.rng.random() < shares.mixed
        if listed and mixed and self.rng.random() < shares.listings:
            row = self._listings(n_tokens)
        else:
            row = self._list_of_facts(n_tokens, mixed) if listed else self._talk(n_tokens, mixed)
        positions = list(range(n_tokens))
        if longest > n_tokens and self.rng.random() < shares.stretched:
            span = int(n_tokens * (longest / n_tokens) ** self.rng.random())
            positions = stretched_positions(n_tokens, row.starts, span, self.rng)
        answers = [answer for answer in row.answers if answer[1] <= n_tokens]
        return row.ids[:n_tokens], positions, row.classes[:n_tokens], answers

    def _talk(self, n_tokens: int, mixed: bool) -> TokenRow:
        """A conversation of at least `n_tokens` tokens."""
        while True:
            seed = self.rng.getrandbits(40)
            if mixed:
                conversation = generate_mixed(seed, int(1.1 * n_tokens), split="train")
            else:
                mix = training_mix(n_tokens, self.rng)
                conversation = generate(seed, n_tokens, split="train", mix=mix)
            row = encode_conversation(conversation, self.tokenizer, n_tokens)
            if len(row.ids) >= n_tokens:
                return row

    def _list_of_facts(self, n_tokens: int, mixed: bool) -> TokenRow:
        """Facts about a few attributes, stated and repeated: many answers in few tokens.

        In the mixed language a person has several, and statements have any form.
        """
        attributes = self.rng.sample(sorted(ATTRIBUTES), self.rng.choice((1, 2, 4)))
        per_person = self.rng.randint(1, len(attributes)) if mixed else 1
        keys = [
            (name, attribute)
            for name in draw_names(self.rng, "train")
            for attribute in self.rng.sample(attributes, per_person)
        ]
        if per_person > 1:
            keys = keys[: len(keys) // self.rng.randint(1, per_person)]
            self.rng.shuffle(keys)
        stated: list[tuple[str, str, str, int]] = []
        row = TokenRow([], [], [], [])
        repeats = self.rng.uniform(0.5, 0.85)
        while len(row.ids) < n_tokens:
            row.starts.append(len(row.ids))
            again = bool(stated) and (self.rng.random() < repeats or not keys)
            form = "says"
            if again:
                name, attribute, value, stated_at = self.rng.choice(stated)
            else:
                name, attribute = keys.pop()
                value = draw_value(attribute, self.rng, "train")
                stated_at = len(row.ids)
                stated.append((name, attribute, value, stated_at))
                form = draw_weighted(self.rng, MIXTURE.clauses) if mixed else form
            clause = CLAUSES[form].format(name=name, attribute=attribute, value=value)
            opening, closing = self.rng.choice(((" ", ""), ("<|assistant|>", "<|end|>")))
            text = capitalize(clause) if closing else clause
            _append(row, f"{opening}{text}.{closing}", self.tokenizer)
            if again:
                end = len(row.ids) - bool(closing)
                start = end - len(self.tokenizer.encode(f" {value}.", add_special_tokens=False))
                row.classes[start:end] = [ANSWER] * (end - start)
                kind = "bare, mixed" if mixed else "bare"
                row.answers.append((start, end, (kind,), start - stated_at))
        return row

    def _listings(self, n_tokens: int) -> TokenRow:
        """Bare facts of a few attributes; again and again those of one are listed.

        The user names them, or they are all, in the order of their statements.
        """
        attributes = self.rng.sample(sorted(ATTRIBUTES), self.rng.choice((1, 2, 3)))
        names = draw_names(self.rng, "train")
        talk = self.rng.choice((0.0, 0.2, 0.4))
        stated: dict[str, list[str]] = {each: [] for each in attributes}
        row = TokenRow([], [], [], [])
        while len(row.ids) < n_tokens:
            row.starts.append(len(row.ids))
            attribute = self.rng.choice(attributes)
            items = stated[attribute]
            if len(items) > 1 and self.rng.random() < 0.25:
                named = self.rng.random() < MIXTURE.named
                if named:
                    items = self.rng.sample(items, self.rng.randint(2, len(items)))
                    names_asked = ", ".join(item.split()[0] for item in items)
                    question = self.rng.choice(NAMED_LIST_QUESTIONS).format(
                        attribute=attribute, names=names_asked
                    )
                    _append(row, f"<|user|>{question}<|end|>", self.tokenizer)
                self._append_listing(row, attribute, items, "named" if named else "every")
            elif not names or len(items) == MIXTURE.list_items[1] or self.rng.random() < talk:
                topic = self.rng.choice(sorted(TOPICS))
                _append(row, f" {draw_line(self.rng, USER_LINES, topic)}", self.tokenizer)
            else:
                name, value = names.pop(), draw_value(attribute, self.rng, "train")
                clause = CLAUSES[draw_weighted(self.rng, MIXTURE.clauses)]
                text = clause.format(name=name, attribute=attribute, value=value)
                _append(row, f" {text}.", self.tokenizer)
                items.append(f"{name} {value}")
        return row

    def _append_listing(self, row: TokenRow, attribute: str, items: list[str], kind: str) -> None:
        """A list as a reply; each of its items is an answer."""
        _append(row, f"<|assistant|>The {attribute} list says", self.tokenizer)
        for item in items:
            start = len(row.ids)
            mark = "." if item is items[-1] else ","
            _append(row, f" {item}{mark}", self.tokenizer)
            row.classes[start:] = [ANSWER] * (len(row.ids) - start)
            row.answers.append((start, len(row.ids), (f"bare, {kind}",), 0))
        _append(row, "<|end|>", self.tokenizer)

    def _drill(self, n_tokens: int) -> tuple[list[int], list[int], list[int], list[Answer]]:
        """Random tokens with repeated spans; tokens of a repetition count as answers."""
        ids: list[int] = []
        classes: list[int] = []
        vocabulary = len(self.tokenizer)
        # A small alphabet makes the token before ambiguous: two or three tokens back must be
        # matched.
        alphabet = self.rng.sample(range(vocabulary), self.rng.choice((16, 32, 64, 256)))
        while len(ids) < n_tokens:
            length = self.rng.randint(6, 24)
            if len(ids) > length and self.rng.random() < 0.6:
                start = self.rng.randrange(len(ids) - length)
                ids += ids[start : start + length]
                classes += [IGNORED] * 3 + [ANSWER] * (length - 3)
            else:
                ids += [self.rng.choice(alphabet) for _ in range(length)]
                classes += [IGNORED] * length
        return ids[:n_tokens], list(range(n_tokens)), classes[:n_tokens], []
