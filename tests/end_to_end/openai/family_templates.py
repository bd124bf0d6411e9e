"""Chat templates of gpt-oss and of DeepSeek V3.1, in short: their marks, and where each puts what."""

from tests.workers.model.thinking import HARMONY

_SYSTEM = """<|start|>system<|message|>You are ChatGPT.

Reasoning: {{ reasoning_effort | default('medium') }}

# Valid channels: analysis, commentary, final.<|end|>
{%- if tools -%}<|start|>developer<|message|># Tools

namespace functions {
{% for tool in tools %}
// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{% endfor -%}
}<|end|>{%- endif -%}"""
GPT_OSS = HARMONY.replace("<|start|>system<|message|>You answer.<|end|>", _SYSTEM)

# A result opens no turn of the assistant: its answer follows at once.
DEEPSEEK = """<｜begin▁of▁sentence｜>
{%- for message in messages if message.role == 'system' -%}{{ message.content }}{%- endfor -%}
{%- if tools %}

## Tools
{% for tool in tools %}

### {{ tool.function.name }}
Description: {{ tool.function.description }}
Parameters: {{ tool.function.parameters | tojson }}
{% endfor -%}
{%- endif -%}
{%- set last = namespace(role='') -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}<｜User｜>{{ message.content }}
{%- elif message.role == 'tool' -%}
<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- elif message.role == 'assistant' -%}
{%- if last.role == 'user' -%}<｜Assistant｜></think>{%- endif -%}
{{- message.content or '' -}}
{%- if message.tool_calls -%}<｜tool▁calls▁begin｜>
{%- for call in message.tool_calls -%}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments -}}
<｜tool▁call▁end｜>
{%- endfor -%}<｜tool▁calls▁end｜>{%- endif -%}<｜end▁of▁sentence｜>
{%- endif -%}
{%- set last.role = message.role -%}
{%- endfor -%}
{%- if add_generation_prompt and last.role == 'user' -%}
<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}
{%- endif -%}"""
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
DEEPSEEK_MARKS = (
    *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
DEEPSEEK_ADDED = ("<think>", "</think>")
