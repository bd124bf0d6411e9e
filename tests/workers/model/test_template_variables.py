"""What a chat template reads beside the conversation is found in its source."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedTokenizerFast

from tests.workers.model.families import FAMILIES
from workers.model.template_variables import find_template_variables

# As models of these families write it.
GPT_OSS = """{%- macro build_system_message() -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{{- "Reasoning: " + reasoning_effort + " " + strftime_now("%Y-%m-%d") }}
{%- endmacro -%}{{ build_system_message() }}"""
LLAMA = """{{- bos_token }}{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b") %}
{%- endif %}{%- if tools is not none %}{{ raise_exception("no tools") }}{% endif %}{{ date_string }}"""
DEEPSEEK = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{%- for message in messages %}{{ message.thinking }}{% if thinking %}{% break %}{% endif %}{% endfor -%}"""
QWEN3 = """{%- set ns = namespace(thinking=true, last=messages | length) -%}
{%- if add_generation_prompt and enable_thinking is defined %}{{ ns.thinking }}{% endif -%}"""
OWN = """{%- for message in messages %}{% if message.role == 'assistant' %}
{%- set thinking = namespace(text=message.thinking) %}{% for one in messages %}{% set thinking.text = one %}{% endfor %}
{{- thinking.text }}{% endif %}{% endfor -%}"""
GRANITE = """{%- set thinking = thinking | default(false) %}{{ thinking }}"""
SMOLLM3 = """{%- for message in messages %}{% generation %}{{ message.content }}{{ custom }}{% endgeneration %}
{%- endfor -%}"""


@pytest.mark.parametrize(
    ("template", "variables"),
    [
        (GPT_OSS, ("reasoning_effort",)),
        (LLAMA, ("bos_token", "date_string")),
        (DEEPSEEK, ("thinking",)),
        (QWEN3, ("enable_thinking",)),
        (SMOLLM3, ("custom",)),
        (OWN, ()),
        (GRANITE, ("thinking",)),
        ({"default": QWEN3, "tool_use": DEEPSEEK}, ("enable_thinking", "thinking")),
        ("{% if %}", ()),
        (None, ()),
    ],
    ids=[
        "gpt-oss",
        "llama",
        "deepseek",
        "qwen3",
        "smollm3",
        "own",
        "granite",
        "several",
        "malformed",
        "none",
    ],
)
def test_they_are_found_wherever_the_template_reads_them(
    byte_level: Callable[..., PreTrainedTokenizerFast], template: str, variables: tuple[str, ...]
) -> None:
    assert find_template_variables(byte_level(template, "<end>")) == variables


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_sets_for_itself_is_none_of_them(
    byte_level: Callable[..., PreTrainedTokenizerFast], family: str
) -> None:
    found = find_template_variables(byte_level(FAMILIES[family].template, FAMILIES[family].end))
    assert set(found) <= {"bos_token", "eos_token"}
