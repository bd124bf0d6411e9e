"""Score the reference model under transformers' own full cache: `python -m reference.evaluate`.

Every question of held-out conversations (seeds, names and values that are not in training) is
answered greedily after the conversation's true history; an answer is right if the reply ends in
exactly the value asked for.
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
from reference.conversation import Conversation, Exchange, generate
from reference.data import render_exchange, render_opening

SCORES_PATH = Path(__file__).parent / "scores.json"
AGE_BOUNDS = (256, 512, 1024, 2048, 4096, 8192, 1 << 20)
MAX_REPLY_TOKENS = 48


@dataclass(frozen=True)
class Outcome:
    """Outcome of one question.

    `kind` is question, tool (the answer after the result), tool call, or corrected (a question on a
    corrected fact). `age` is the number of tokens from the fact's statement to the answer.
    """

    kind: str
    age: int
    right: bool
    reply: str
    expected: str


@dataclass(frozen=True)
class Row:
    """Exact match of one group of questions."""

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
    def answer(self) -> str:
        """The greedy reply to the history so far, which is not appended to it."""
        output = self.model.generate(
            torch.tensor([self.ids]),
            attention_mask=torch.ones(1, len(self.ids), dtype=torch.long),
            past_key_values=self.cache,
            max_new_tokens=MAX_REPLY_TOKENS,
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
        kind: str = exchange.kind
        if conversation.exchanges[exchange.fact_exchange].kind == "correction":
            kind = "corrected"
        reply = reader.answer()
        age = len(reader.ids) - stated_at[exchange.fact_exchange]
        yield Outcome(kind, age, exchange.is_answered_by(reply), reply, exchange.reply)
        reader.feed(last)


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
    """Exact match over all answers, by kind and by age."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        groups[f"kind {outcome.kind}"].append(outcome.right)
        if outcome.kind == "tool call":
            continue
        groups["all answers"].append(outcome.right)
        bound = next(bound for bound in AGE_BOUNDS if outcome.age <= bound)
        groups[f"age up to {bound:5d}"].append(outcome.right)
        if outcome.age <= 4096:
            groups["all ages up to 4096"].append(outcome.right)
    return [
        Row(f"{condition}: {name}", "full", round(sum(each) / len(each), 4), len(each))
        for name, each in sorted(groups.items())
    ]


def score(
    folder: Path, lengths: Sequence[int], n_conversations: int, seed: int, show_wrong: int
) -> list[Row]:
    """Rows of every length; prints them, and a few wrong answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    rows: list[Row] = []
    for length in lengths:
        outcomes: list[Outcome] = []
        for index in range(n_conversations):
            conversation = generate(seed + index, length, split="held_out")
            outcomes.extend(conversation_outcomes(model, tokenizer, conversation))
        rows.extend(group_rows(f"{length} tokens", outcomes))
        for row in rows[-20:]:
            if row.condition.startswith(f"{length} tokens"):
                print(f"{row.condition:44s} {row.mean:.3f}  n={row.n}", flush=True)
        for outcome in [each for each in outcomes if not each.right][:show_wrong]:
            print(
                f"   wrong ({outcome.kind}, age {outcome.age}): "
                f"{outcome.reply!r}, not {outcome.expected!r}"
            )
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
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 10240])
    parser.add_argument("--conversations", type=int, default=4, help="conversations of each length")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--show-wrong", type=int, default=3)
    parser.add_argument("--out", type=Path, default=SCORES_PATH)
    given = parser.parse_args()
    rows = score(given.model, given.lengths, given.conversations, given.seed, given.show_wrong)
    given.out.write_text(json.dumps(report(rows, given.seed), indent=1) + "\n")


if __name__ == "__main__":
    main()
