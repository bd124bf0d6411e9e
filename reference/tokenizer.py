"""Tokenizer of the reference model, a byte-level BPE of 1,280 tokens, and its chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from reference.conversation import generate
from reference.words import CITY_ENDS, CITY_STARTS, COLOURS, NAME_ENDS, NAME_STARTS, THINGS

VOCABULARY = 1280
PADDING = "<|pad|>"
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL_TOKENS = ("<tool_call>", "</tool_call>")
MAX_TOKENS = 16_384

CHAT_TEMPLATE = """
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is none or content is undefined -%}
{%- elif content is iterable and content is not mapping -%}
{%- for part in content -%}
{%- if part is string -%}{{ part }}
{%- elif part is mapping and part.text is string -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- else -%}{{ content | tojson }}{%- endif -%}
{%- endmacro -%}
{%- macro listed() -%}
{%- for tool in tools -%}
{%- set function = tool.function if tool.function else tool -%}
{%- if loop.first %}Tools: {% endif -%}
{{ function.name }}({% if function.parameters and function.parameters.properties -%}
{{ function.parameters.properties.keys() | join(', ') }}
{%- endif %}){{ '.' if loop.last else ', ' }}
{%- endfor -%}
{%- endmacro -%}
{%- set begins_with_system = messages and messages[0].role in ['system', 'developer'] -%}
{%- if tools and not begins_with_system -%}<|system|>{{ listed() }}<|end|>{%- endif -%}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}
<|system|>{{ text(message.content) }}{% if loop.first and tools %} {{ listed() }}{% endif %}<|end|>
{%- elif message.role in ['tool', 'function'] -%}
<|tool|>{{ text(message.content) }}<|end|>
{%- elif message.role == 'assistant' -%}
<|assistant|>{{ text(message.content) }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function else call -%}
<tool_call>{"name": {{ (function.name or '') | tojson }}, "arguments": {%
 if function.arguments is string -%}
{{ function.arguments if function.arguments else '{}' }}
{%- else -%}{{ (function.arguments or {}) | tojson }}{%- endif %}}</tool_call>
{%- endfor -%}<|end|>
{%- else -%}
<|user|>{{ text(message.content) }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def corpus(n_conversations: int) -> Iterator[str]:
    """Texts of generated training conversations, and the pieces of names and values by themselves.

    The pieces are repeated so that each becomes a token: an unseen name is then a new pair of known
    tokens.
    """
    for _ in range(40 * n_conversations):
        yield from NAME_ENDS
        yield from CITY_ENDS
        for piece in NAME_STARTS + CITY_STARTS + COLOURS + THINGS:
            yield f" {piece}"
    for _ in range(20 * n_conversations):
        yield from NAME_STARTS
    for seed in range(n_conversations):
        conversation = generate(seed, 3000, split="train")
        for message in conversation.messages():
            yield message["content"]
            for call in message.get("tool_calls", ()):
                function = call["function"]
                yield f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
        yield "Tools: " + ", ".join(tool["function"]["name"] + "(" for tool in conversation.tools)


def train_tokenizer(n_conversations: int = 300) -> PreTrainedTokenizerFast:
    """Train a tokenizer on generated conversations; it encodes any text, if need be by bytes.

    Digits are single tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CALL_TOKENS),
        special_tokens=[PADDING, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(n_conversations), trainer)
    return _wrap(tokenizer)


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The transformers tokenizer: role tokens are special, call tokens remain in decoded text."""
    wrap: Any = PreTrainedTokenizerFast  # its constructor is untyped
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer,
        pad_token=PADDING,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.add_tokens(list(CALL_TOKENS), special_tokens=False)
    wrapped.chat_template = CHAT_TEMPLATE.strip()
    return wrapped
