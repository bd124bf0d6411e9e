"""Score the reference model under transformers' own full cache: `python -m reference.evaluate`.

Every question of held-out conversations (seeds, names and values that are not in training) is
answered greedily after the conversation's true history; an answer is right if the reply ends in
exactly the value asked for, a list if it has exactly the facts asked for, in any order. The plain
language is scored by the age of facts, the mixed one by the forms of `forms.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from reference import MODEL_PATH
from reference.conversation import Conversation, Exchange, generate, listed_items
from reference.data import render_exchange, render_opening
from reference.mixed import generate_mixed

SCORES_PATH = Path(__file__).parent / "scores.json"
AGE_BOUNDS = (256, 512, 1024, 2048, 4096, 8192, 1 << 20)
MAX_REPLY_TOKENS = 48
MAX_LIST_TOKENS = 192


@dataclass(frozen=True)
class Outcome:
    """Outcome of one question.

    `kind` is question, tool (the answer after the result), tool call, list, or corrected (a question
    on a corrected fact). `age` is the number of tokens from the fact's statement to the answer.
    `forms` are the exchange's; `recall` and `precision` those of a list's items.
    """

    kind: str
    age: int
    right: bool
    reply: str
    expected: str
    forms: tuple[str, ...] = ()
    recall: float = 1.0
    precision: float = 1.0


@dataclass(frozen=True)
class Row:
    """Mean of a measure, exact match unless the condition names another, of one group of questions."""

    condition: str
    method: str
    mean: float
    n: int


class FullCacheReader:
    """Reads a conversation once and answers in between, with transformers' DynamicCache."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model: Any = model  # generate is not found through the typed base class
        self.tokenizer = tokenizer
        self.cache = DynamicCache(config=model.config)
        self.ids: list[int] = []

    def feed(self, text: str) -> None:
        """Append text to the history; its keys are computed with the next answer."""
        self.ids.extend(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def answer(self, max_tokens: int = MAX_REPLY_TOKENS) -> str:
        """The greedy reply to the history so far, which is not appended to it."""
        output = self.model.generate(
            torch.tensor([self.ids]),
            attention_mask=torch.ones(1, len(self.ids), dtype=torch.long),
            past_key_values=self.cache,
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        self.cache.crop(len(self.ids) - 1 - self.cache.get_seq_length())
        return str(self.tokenizer.decode(output[0, len(self.ids) :], skip_special_tokens=True))


def conversation_outcomes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> Iterator[Outcome]:
    """Outcomes of all questions of a conversation, each asked after its true history."""
    reader = FullCacheReader(model, tokenizer)
    reader.feed(render_opening(conversation))
    stated_at: list[int] = []
    for exchange in conversation.exchanges:
        stated_at.append(len(reader.ids))
        rendered = render_exchange(exchange)
        if exchange.fact_exchange is None:
            reader.feed(rendered)
            continue
        *before, last = rendered.split("<|assistant|>")
        fed = "<|assistant|>".join(before)
        if exchange.tool_call is not None:
            yield _tool_call_outcome(reader, exchange, fed)
            fed = fed[fed.index("<|assistant|>") + len("<|assistant|>") :]
        reader.feed(fed + "<|assistant|>")
        reply = reader.answer(MAX_LIST_TOKENS if exchange.items else MAX_REPLY_TOKENS)
        age = len(reader.ids) - stated_at[exchange.fact_exchange]
        yield _answer_outcome(exchange, conversation.exchanges[exchange.fact_exchange], age, reply)
        reader.feed(last)


def _answer_outcome(exchange: Exchange, stated: Exchange, age: int, reply: str) -> Outcome:
    kind = "corrected" if stated.kind == "correction" else exchange.kind
    right = exchange.is_answered_by(reply)
    if not exchange.items:
        return Outcome(kind, age, right, reply, exchange.reply, exchange.forms)
    listed = listed_items(reply)
    found = len(set(exchange.items).intersection(listed))
    recall, precision = found / len(exchange.items), found / max(1, len(listed))
    return Outcome(kind, age, right, reply, exchange.reply, exchange.forms, recall, precision)


def _tool_call_outcome(reader: FullCacheReader, exchange: Exchange, fed: str) -> Outcome:
    """Outcome of a tool call: right with the right tool and arguments."""
    reader.feed(fed[: fed.index("<|assistant|>")] + "<|assistant|>")
    reply = reader.answer()
    call = parse_call(reply)
    wanted = exchange.tool_call
    right = wanted is not None and call == {"name": wanted.name, "arguments": wanted.arguments}
    return Outcome("tool call", 0, right, reply, json.dumps(asdict(wanted)) if wanted else "")


def parse_call(reply: str) -> dict[str, Any] | None:
    """The tool call in a reply; None if there is none or it is not JSON."""
    start, _, rest = reply.partition("<tool_call>")
    body, closed, _ = rest.partition("</tool_call>")
    if start or not closed:
        return None
    try:
        call = json.loads(body)
    except json.JSONDecodeError:
        return None
    return call if isinstance(call, dict) else None


def group_rows(condition: str, outcomes: Sequence[Outcome]) -> list[Row]:
    """Exact match over all answers, by kind, by age and by form; recall and precision of lists."""
    groups: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        groups[f"kind {outcome.kind}"].append(outcome.right)
        if outcome.kind == "tool call":
            continue
        groups["all answers"].append(outcome.right)
        bound = next(bound for bound in AGE_BOUNDS if outcome.age <= bound)
        groups[f"age up to {bound:5d}"].append(outcome.right)
        if outcome.age <= 4096:
            groups["all ages up to 4096"].append(outcome.right)
        for form in outcome.forms:
            groups[f"form {form}"].append(outcome.right)
        if outcome.kind == "list":
            (form,) = outcome.forms
            groups[f"recall of {form}"].append(outcome.recall)
            groups[f"precision of {form}"].append(outcome.precision)
    return [
        Row(f"{condition}: {name}", "full", round(sum(each) / len(each), 4), len(each))
        for name, each in sorted(groups.items())
    ]


@dataclass(frozen=True)
class Sample:
    """Held-out conversations of one language: `n_conversations` of each of `lengths` tokens."""

    lengths: Sequence[int]
    n_conversations: int
    mixed: bool = False

    def conversations(self, length: int, seed: int) -> Iterator[Conversation]:
        """The conversations of one length, seeds from `seed` on."""
        write = generate_mixed if self.mixed else generate
        return (write(seed + index, length) for index in range(self.n_conversations))


def score(folder: Path, samples: Sequence[Sample], seed: int, show_wrong: int) -> list[Row]:
    """Rows of every sample and length; prints them, and a few wrong answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    rows: list[Row] = []
    for sample, length in ((each, length) for each in samples for length in each.lengths):
        outcomes: list[Outcome] = []
        for conversation in sample.conversations(length, seed):
            outcomes.extend(conversation_outcomes(model, tokenizer, conversation))
        condition = f"{length} tokens, mixed language" if sample.mixed else f"{length} tokens"
        rows.extend(_printed(group_rows(condition, outcomes)))
        for outcome in [each for each in outcomes if not each.right][:show_wrong]:
            print(
                f"   wrong ({outcome.kind}, age {outcome.age}, {', '.join(outcome.forms)}): "
                f"{outcome.reply!r}, not {outcome.expected!r}"
            )
    return rows


def _printed(rows: Sequence[Row]) -> Sequence[Row]:
    for row in rows:
        print(f"{row.condition:60s} {row.mean:.3f}  n={row.n}", flush=True)
    return rows


def report(rows: Sequence[Row], seed: int) -> dict[str, Any]:
    """Content of the result file."""
    return {
        "suite": "reference",
        "command": shlex.join(["python", "-m", "reference.evaluate", *sys.argv[1:]]),
        "seed": seed,
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "model": "reference/model",
        "results": [asdict(row) for row in rows],
    }


def main() -> None:
    """Read the command line, score, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 10240])
    parser.add_argument("--conversations", type=int, default=4, help="conversations of each length")
    parser.add_argument("--mixed-lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--mixed-conversations", type=int, default=24, help="of each length")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--show-wrong", type=int, default=3)
    parser.add_argument("--out", type=Path, default=SCORES_PATH)
    given = parser.parse_args()
    samples = (
        Sample(given.lengths, given.conversations),
        Sample(given.mixed_lengths, given.mixed_conversations, mixed=True),
    )
    rows = score(given.model, samples, given.seed, given.show_wrong)
    given.out.write_text(json.dumps(report(rows, given.seed), indent=1) + "\n")


if __name__ == "__main__":
    main()
