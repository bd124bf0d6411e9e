"""The shipped weights, under transformers' own full cache."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from reference import MODEL_PATH
from reference.conversation import generate
from reference.evaluate import FullCacheReader, Outcome, conversation_outcomes, parse_call


@pytest.fixture(scope="module")
def outcomes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Outcome]:
    return [
        outcome
        for seed in (11, 12)
        for outcome in conversation_outcomes(
            model, tokenizer, generate(seed, 1500, split="held_out")
        )
    ]


def test_it_has_two_to_twelve_million_parameters_in_at_most_24_mb(model: PreTrainedModel) -> None:
    assert 2e6 <= sum(each.numel() for each in model.parameters()) <= 12e6
    assert sum(file.stat().st_size for file in MODEL_PATH.glob("*.safetensors")) <= 24e6


def test_it_answers_held_out_questions(outcomes: list[Outcome]) -> None:
    answers = [outcome for outcome in outcomes if outcome.kind != "tool call"]
    wrong = [(outcome.reply, outcome.expected) for outcome in answers if not outcome.right]
    assert len(answers) >= 30
    assert len(wrong) <= 0.05 * len(answers), wrong


def test_it_calls_the_right_tool_with_the_right_arguments(outcomes: list[Outcome]) -> None:
    calls = [outcome for outcome in outcomes if outcome.kind == "tool call"]
    assert len(calls) >= 8
    assert all(parse_call(outcome.reply) is not None for outcome in calls)
    assert sum(outcome.right for outcome in calls) >= 0.9 * len(calls)


def test_answers_from_the_cache_equal_answers_from_the_start(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    parts = (
        "<|user|>Please note that the extension list says Melnor K4821.<|end|>"
        "<|assistant|>Noted.<|end|>",
        "<|user|>What is Melnor's extension?<|end|><|assistant|>",
    )
    reader = FullCacheReader(model, tokenizer)
    reader.feed(
        parts[0] + "<|user|>Who is on call tonight, and what is their pin?<|end|><|assistant|>"
    )
    reader.answer()
    reader.feed("Noted.<|end|>" + parts[1])
    ids = torch.tensor([reader.ids])
    generating: Any = model
    uncached = generating.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False
    )
    assert reader.answer() == tokenizer.decode(
        uncached[0, ids.shape[1] :], skip_special_tokens=True
    )
    assert reader.answer() == "The extension list says Melnor K4821."


@pytest.mark.parametrize(
    "reply",
    [
        "Noted.",
        "<tool_call>{",
        "<tool_call>{]</tool_call>",
        'So: <tool_call>{"name": "f"}</tool_call>',
        "<tool_call>1</tool_call>",
    ],
)
def test_a_malformed_call_is_no_call(reply: str) -> None:
    assert parse_call(reply) is None
