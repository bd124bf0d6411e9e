"""Training batches."""

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from reference.data import ANSWER, Batch, BatchMaker, Shares

CONVERSATIONS = Shares(stretched=0, drills=0, lists=0, mixed=0, listings=0)
N_TOKENS = 400


def make(tokenizer: PreTrainedTokenizerBase, shares: Shares, seed: int = 1) -> Batch:
    return BatchMaker(tokenizer, seed).make(6, N_TOKENS, 4096, shares)


def kinds(batch: Batch) -> set[str]:
    return {name for row in batch.answers for _, _, names, _ in row for name in names}


def test_batches_are_a_function_of_the_seed(tokenizer: PreTrainedTokenizerBase) -> None:
    shares = Shares(stretched=0.5, drills=0.2, lists=0.3, mixed=0.5, listings=0.5)
    first, second = (make(tokenizer, shares) for _ in range(2))
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.positions, second.positions)
    assert not torch.equal(first.ids, make(tokenizer, shares, seed=2).ids)


def test_shares_choose_the_language(tokenizer: PreTrainedTokenizerBase) -> None:
    assert kinds(make(tokenizer, CONVERSATIONS)) <= {"question", "tool"}
    mixed = kinds(make(tokenizer, replace(CONVERSATIONS, mixed=1)))
    assert {"question first", "question between"} <= mixed
    assert not mixed & {"question", "bare, named"}


@pytest.mark.parametrize("listings", [0.0, 1.0])
def test_what_bare_facts_repeat_was_stated(
    tokenizer: PreTrainedTokenizerBase, listings: float
) -> None:
    batch = make(tokenizer, replace(CONVERSATIONS, lists=1, mixed=1, listings=listings))
    assert kinds(batch) == ({"bare, named", "bare, every"} if listings else {"bare, mixed"})
    for ids, classes, answers in zip(batch.ids, batch.classes, batch.answers, strict=True):
        assert answers
        for start, end, _, _ in answers:
            assert set(classes[start:end].tolist()) == {ANSWER}
            answer = str(tokenizer.decode(ids[start:end])).strip().rstrip(".,")
            stated = answer.partition(" ")[2] if listings else answer
            assert f" {stated}." in str(tokenizer.decode(ids[:start]))


def test_stretched_positions_ascend_beyond_the_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    positions = make(tokenizer, replace(CONVERSATIONS, stretched=1)).positions
    assert bool((positions.diff() >= 1).all())
    assert N_TOKENS < positions.max() < 4096
