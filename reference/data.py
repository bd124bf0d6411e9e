"""Training batches: token ids of conversations, classes of tokens, and positions."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from reference.conversation import (
    CLAUSE,
    MAX_FACTS,
    Conversation,
    Exchange,
    Mix,
    exchange_messages,
    generate,
)
from reference.words import ATTRIBUTES, draw_names, draw_value

# Classes of a predicted token: not trained on, language modelling, part of an answer's value.
IGNORED = 0
ORDINARY = 1
ANSWER = 2


@dataclass
class TokenRow:
    """One sequence under construction.

    `starts` are the indices at which an exchange starts. `answers` has for each answer the first
    index and the end of its value, its kind, and the age of its fact in tokens.
    """

    ids: list[int]
    classes: list[int]
    starts: list[int]
    answers: list[tuple[int, int, str, int]]


@dataclass(frozen=True)
class Batch:
    """Tensors int64 `[rows, tokens]`, and the answers of each row."""

    ids: torch.Tensor
    positions: torch.Tensor
    classes: torch.Tensor
    answers: list[list[tuple[int, int, str, int]]]


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
    """Append an exchange; the answer's value is last in its reply, before the full stop."""
    _append(row, render_exchange(exchange), tokenizer)
    if exchange.answer is None or exchange.fact_exchange is None:
        return
    value = tokenizer.encode(f" {exchange.answer}.", add_special_tokens=False)
    end = len(row.ids) - 2
    start = end - len(value) + 1
    row.classes[start : end + 1] = [ANSWER] * (end + 1 - start)
    row.answers.append((start, end + 1, exchange.kind, start - stated_at[exchange.fact_exchange]))


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


class BatchMaker:
    """Endless training batches, a function of the seed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    def make(
        self, rows: int, n_tokens: int, stretch: float, longest: int, drills: float, lists: float
    ) -> Batch:
        """A batch of `rows` sequences of `n_tokens` tokens.

        A share `stretch` of them covers up to `longest` positions; a share `drills` repeats random
        tokens, a share `lists` is bare facts stated and repeated.
        """
        sequences = [self._row(n_tokens, stretch, longest, drills, lists) for _ in range(rows)]
        ids, positions, classes = (
            torch.tensor([row[part] for row in sequences]) for part in range(3)
        )
        return Batch(ids, positions, classes, [row[3] for row in sequences])

    def _row(
        self, n_tokens: int, stretch: float, longest: int, drills: float, lists: float
    ) -> tuple[list[int], list[int], list[int], list[tuple[int, int, str, int]]]:
        if self.rng.random() < drills:
            return self._drill(n_tokens)
        row = (
            self._list_of_facts(n_tokens)
            if self.rng.random() < lists
            else self._conversation(n_tokens)
        )
        positions = list(range(n_tokens))
        if longest > n_tokens and self.rng.random() < stretch:
            span = int(n_tokens * (longest / n_tokens) ** self.rng.random())
            positions = stretched_positions(n_tokens, row.starts, span, self.rng)
        answers = [answer for answer in row.answers if answer[1] <= n_tokens]
        return row.ids[:n_tokens], positions, row.classes[:n_tokens], answers

    def _conversation(self, n_tokens: int) -> TokenRow:
        """A conversation of at least `n_tokens` tokens."""
        while True:
            mix = training_mix(n_tokens, self.rng)
            conversation = generate(self.rng.getrandbits(40), n_tokens, split="train", mix=mix)
            row = encode_conversation(conversation, self.tokenizer, n_tokens)
            if len(row.ids) >= n_tokens:
                return row

    def _list_of_facts(self, n_tokens: int) -> TokenRow:
        """Facts about a few attributes, stated and repeated: many answers in few tokens."""
        names = draw_names(self.rng, "train")
        attributes = self.rng.sample(sorted(ATTRIBUTES), self.rng.choice((1, 2, 4)))
        keys = [(name, self.rng.choice(attributes)) for name in names]
        stated: list[tuple[str, str, str, int]] = []
        row = TokenRow([], [], [], [])
        repeats = self.rng.uniform(0.5, 0.85)
        kind = "list"
        form = CLAUSE
        while len(row.ids) < n_tokens:
            row.starts.append(len(row.ids))
            again = bool(stated) and (self.rng.random() < repeats or not keys)
            if again:
                name, attribute, value, stated_at = self.rng.choice(stated)
            else:
                name, attribute = keys.pop()
                value = draw_value(attribute, self.rng, "train")
                stated_at = len(row.ids)
                stated.append((name, attribute, value, stated_at))
            opening, closing = self.rng.choice(((" the", ""), ("<|assistant|>The", "<|end|>")))
            clause = form.format(name=name, attribute=attribute, value=value)
            _append(row, f"{opening}{clause.removeprefix('the')}.{closing}", self.tokenizer)
            if again:
                end = len(row.ids) - bool(closing)
                start = end - len(self.tokenizer.encode(f" {value}.", add_special_tokens=False))
                row.classes[start:end] = [ANSWER] * (end - start)
                row.answers.append((start, end, kind, start - stated_at))
        return row

    def _drill(
        self, n_tokens: int
    ) -> tuple[list[int], list[int], list[int], list[tuple[int, int, str, int]]]:
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
