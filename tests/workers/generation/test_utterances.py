"""Who said how much of a turn, as the chat template renders it."""

from collections.abc import Sequence

import pytest

from workers.generation.utterances import utterance_tokens
from workers.model.tokenizer import ChatTokenizer


def _messages(roles: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": f"number {index} is {7 * index}"}
        for index, role in enumerate(roles)
    ]


@pytest.mark.parametrize(
    ("roles", "generate", "runs"),
    [
        (["user"], True, 2),
        (["user"], False, 1),
        (["system", "user"], True, 2),
        (["user", "assistant"], False, 2),
        (["user", "assistant", "user", "assistant", "user"], True, 6),
        (["user", "assistant", "assistant", "user", "user"], False, 3),
        (["user", "assistant"], True, 3),
    ],
)
def test_every_token_belongs_to_one_sides_run(
    roles: list[str], generate: bool, runs: int, tokenizer: ChatTokenizer
) -> None:
    segments = tokenizer.prompt([], _messages(roles), [], generate)
    counts = utterance_tokens(roles, segments, 10 if generate else None)
    assert len(counts) == runs
    assert min(counts) > 3
    assert sum(counts) == sum(len(segment.token_ids) for segment in segments) + (
        10 if generate else 0
    )


def test_each_run_has_the_tokens_of_its_own_messages(tokenizer: ChatTokenizer) -> None:
    """A side's first run is as long as if the others had not come after it."""
    roles = ["user", "user", "assistant", "assistant", "user"]
    messages = _messages(roles)
    segments = tokenizer.prompt([], messages, [], True)
    counts = utterance_tokens(roles, segments, 4)
    asked = tokenizer.prompt([], messages[:2], [], True)
    assert counts[0] == len(asked[0].token_ids)
    assert counts[1] == sum(len(segment.token_ids) for segment in segments[1:4])
    assert counts[3] == 4


def test_a_turn_that_an_assistants_message_opens_has_no_run_before_it(
    tokenizer: ChatTokenizer,
) -> None:
    said = _messages(["user"])
    segments = tokenizer.prompt(said, _messages(["assistant", "user"]), [], True)
    counts = utterance_tokens(["assistant", "user"], segments, 2)
    assert len(counts) == 3
    assert sum(counts) == sum(len(segment.token_ids) for segment in segments) + 2
