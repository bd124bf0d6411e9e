"""Chat templates that drop the reasoning of earlier answers, as those of Qwen3 and gpt-oss do."""

QWEN3 = """
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{%- endfor -%}
{%- for message in messages -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' -%}
<tool_response>
{{ message.content }}
</tool_response>
{%- elif message.role == 'assistant' -%}
{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' -%}
{%- if loop.index0 > last.user and (loop.last or reasoning) -%}
<think>
{{ reasoning.strip('\\n') }}
</think>

{% endif -%}
{{ message.content.lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}
{%- else -%}
{{ message.content }}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false -%}
<think>

</think>

{% elif opened is defined -%}<think>
{% endif -%}
{% endif -%}"""
"""In ChatML. With `opened` the prompt begins the reasoning."""
QWEN3_END = "<|im_end|>"
QWEN3_MARKS = ("<|im_start|>",)
QWEN3_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")

HARMONY = """<|start|>system<|message|>You answer.<|end|>
{%- set called = namespace(name='') -%}
{%- for message in messages -%}
{%- set answered = namespace(found=false) -%}
{%- for later in messages[loop.index:] -%}
{%- if later.role == 'assistant' and 'tool_calls' not in later -%}{%- set answered.found = true -%}{%- endif -%}
{%- endfor -%}
{%- if message.role == 'assistant' and 'tool_calls' in message -%}
{%- if message.thinking and not answered.found -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
{%- set called.name = message.tool_calls[0].function.name -%}
<|start|>assistant<|channel|>commentary to=functions.{{ called.name }} <|constrain|>json<|message|>
{{- message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' -%}
{%- if message.thinking and loop.last and not add_generation_prompt -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
{%- endif -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{% endif -%}"""
HARMONY_END = "<|return|>"
HARMONY_MARKS = (
    *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>"),
)
