"""Rendering costs what is new, and gives the template's own text also where it repeats no prompt."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from workers.model.calls.messages import write_tools
from workers.model.tokenizer import ChatMessage, ChatTokenizer, keep_recent

NOT_REPEATED = """
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}{% if message.role == 'assistant' %}<|end|>{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>
{% endif -%}"""
"""As DeepSeek-R1's distilled models: a prompt that opens the thinking, no end of the user's turn."""

ENDS_EVERY_TURN = NOT_REPEATED.replace(" if message.role == 'assistant' ", " if true ")

CONVERSATION: list[ChatMessage] = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "<nearly a thought> Hello."},
    {"role": "user", "content": "And?"},
    {"role": "tool", "content": "A result."},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Well."},
]


class Counting(ChatTokenizer):
    """Counts the messages that the template renders."""

    rendered: list[int]

    def _render(
        self, messages: list[ChatMessage], setting: Any, prompt: bool, *, continues: bool = False
    ) -> str:
        self.rendered.append(len(messages))
        return super()._render(messages, setting, prompt, continues=continues)


@pytest.fixture
def of_template(
    byte_level: Callable[..., PreTrainedTokenizerFast],
) -> Callable[[str], Counting]:
    """of_template(template): a byte-level tokenizer with that template."""

    def make(template: str) -> Counting:
        inner = byte_level(template, "<|end|>")
        made = Counting(inner, (inner.eos_token_id,))
        object.__setattr__(made, "rendered", [])
        return made

    return make


def _text(tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], sizes: Sequence[int]) -> str:
    """What a session has after these messages, given in turns of these sizes."""
    token_ids: list[int] = []
    recent: list[ChatMessage] = []
    for end, size in zip(_sums(sizes), sizes, strict=True):
        new = list(messages[end - size : end])
        for segment in tokenizer.prompt(recent, new, [], end == len(messages)):
            token_ids += segment.token_ids
        recent = keep_recent([*recent, *new])
    return tokenizer.decode(token_ids)


def _sums(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]


@pytest.mark.parametrize("template", [NOT_REPEATED, ENDS_EVERY_TURN], ids=["no end", "an end"])
@pytest.mark.parametrize("sizes", [(6,), (2, 4), (2, 1, 1, 1, 1), (1, 1, 4), (5, 1)])
def test_a_recorded_answer_has_one_header(
    template: str, sizes: tuple[int, ...], of_template: Callable[[str], Counting]
) -> None:
    tokenizer = of_template(template)
    whole = tokenizer.inner.apply_chat_template(
        write_tools(CONVERSATION, []), tokenize=False, add_generation_prompt=True
    )
    assert _text(tokenizer, CONVERSATION, sizes) == whole


def test_a_recorded_answer_is_marked_with_its_header_where_the_prompt_is_another(
    of_template: Callable[[str], Counting],
) -> None:
    tokenizer = of_template(NOT_REPEATED)
    segments = tokenizer.prompt([], CONVERSATION[:2], [], generate=False)
    assert [(tokenizer.decode(s.token_ids), s.recorded) for s in segments] == [
        ("<|user|>Hi.", False),
        ("<|assistant|><nearly a thought> Hello.<|end|>", True),
    ]


@pytest.mark.parametrize("kind", ["chat", "agent", "questions"])
def test_rendering_a_turn_costs_what_is_in_it(
    kind: str, of_template: Callable[[str], Counting]
) -> None:
    """Also where no user's message comes between: an agent's calls and results."""
    tokenizer = of_template(ENDS_EVERY_TURN)
    first: list[ChatMessage] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Begin."},
    ]
    pairs: dict[str, tuple[str, ...]] = {
        "chat": ("assistant", "user"),
        "agent": ("assistant", "tool"),
        "questions": ("user",),
    }
    roles = pairs[kind]
    new = [{"role": roles[i % len(roles)], "content": f"Message {i}."} for i in range(510)]
    segments = tokenizer.prompt([], [*first, *new], [], generate=True)
    assert sum(tokenizer.rendered) < 10 * 512
    text = tokenizer.decode([token for segment in segments for token in segment.token_ids])
    assert text.count("Message") == 510
