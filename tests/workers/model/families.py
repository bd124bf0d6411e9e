"""Chat templates in the forms of model families, with the marks that their vocabularies have.

Each renders every member that a message, a call, a tool and a document have.
"""

from dataclasses import dataclass

from tests.workers.model import test_gguf, test_rendering, test_tokenizer, test_tool_messages


@dataclass(frozen=True)
class Family:
    """A template, its end of turn, and the vocabulary's tokens that are special or only added."""

    template: str
    end: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


_CHATML = ("<|im_start|>", "<|endoftext|>")
_QWEN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")

QWEN = """
{%- if tools or documents -%}<|im_start|>system
{%- for tool in tools or [] %}
{{ tool | tojson }}{% endfor %}
{%- for each in documents or [] %}
{{ each.title }}: {{ each.text }} {{ each.tags | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{%- if message.name %} name={{ message.name }}{% endif %}
{% if message.role == 'tool' -%}
<tool_response>{{ message.tool_call_id }}
{{ message.content }}
</tool_response>
{%- elif message.role == 'assistant' and '</think>' in message.content -%}
<think>{{ message.content.split('</think>')[0].split('<think>')[-1] }}</think>
{{- message.content.split('</think>')[-1] }}
{%- else -%}
{{ message.content }}
{%- endif -%}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {'id': call.id, 'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

QWEN_CODER = QWEN.replace(
    "{{ {'id': call.id, 'name': call.function.name, 'arguments': call.function.arguments} | tojson }}",
    "<function={{ call.function.name }}>\n{%- if call.function.arguments is mapping %}"
    "{% for name, value in call.function.arguments.items() %}\n<parameter={{ name }}>\n{{ value }}\n"
    "</parameter>{% endfor %}{% endif %}\n</function>",
)

LLAMA = """
{{- bos_token }}
{%- for message in messages -%}
<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif -%}
{%- if loop.first %}{% for each in documents or [] %}[{{ each.title }}] {{ each.text }}
{% endfor %}{% endif -%}
{{- message.content | trim }}
{%- for call in message.tool_calls or [] -%}
<|python_tag|>{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor -%}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>

{% endif -%}"""

MISTRAL = """
{{- bos_token }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]
{%- elif message.role == 'user' -%}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'tool' -%}[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]
{{- message.content }}[/TOOL_RESULTS]
{%- else -%}{{ message.content }}
{%- for call in message.tool_calls or [] -%}
[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor -%}</s>
{%- endif -%}
{%- endfor -%}"""
_MISTRAL_MARKS = (
    *("<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"),
    *("[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
)

GEMMA = """
{{- bos_token }}
{%- for message in messages -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if loop.first %}{% for tool in tools or [] -%}
<start_function_declaration>{{ tool.function.name }}{description:<escape>{{ tool.function.description }}<escape>,
{{- tool.function.parameters | tojson }}}<end_function_declaration>
{%- endfor %}{% endif -%}
{%- if message.role == 'tool' -%}
<start_function_response>{{ message.name }}{<escape>{{ message.content }}<escape>}<end_function_response>
{%- else -%}{{ message.content | trim }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
<start_function_call>{{ call.function.name }}{
{%- if call.function.arguments is mapping %}{% for name, value in call.function.arguments | dictsort -%}
{{ name }}:<escape>{{ value }}<escape>{% endfor %}{% endif -%}
}<end_function_call>
{%- endfor -%}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}"""
_GEMMA_MARKS = (
    *("<bos>", "<start_of_turn>", "<escape>", "<start_function_call>", "<end_function_call>"),
    *("<start_function_declaration>", "<end_function_declaration>", "<start_function_response>"),
    *("<end_function_response>", *(f"<unused{number}>" for number in range(40))),
)

HARMONY = """
{%- if tools -%}<|start|>developer<|message|>
{%- for tool in tools %}
// {{ tool.function.description }}
type {{ tool.function.name }} = {{ tool.function.parameters | tojson }}
{%- endfor %}<|end|>{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|start|>functions.{{ message.name }} to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<|channel|>commentary to=functions.{{ call.function.name }} <|constrain|>json<|message|>
{{- call.function.arguments | tojson }}
{%- endfor -%}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant<|channel|>final<|message|>{% endif -%}"""

FAMILIES = {
    "chatml": Family(test_tokenizer.DEFAULT_SYSTEM, "<|im_end|>", _CHATML),
    "drops thinking": Family(test_tokenizer.DROPS_THINKING, "<|im_end|>", _CHATML, _THINK),
    "no end": Family(test_rendering.NOT_REPEATED, "<|end|>", ("<|user|>", "<|assistant|>")),
    "an end": Family(test_rendering.ENDS_EVERY_TURN, "<|end|>", ("<|user|>",), ("<think>",)),
    "no tools": Family(test_tool_messages.PLAIN, "</s>", ("<s>",), _QWEN_ADDED),
    "gguf": Family(test_gguf.TEMPLATE, "<end>", ("<user>", "<assistant>", "<tool>")),
    "qwen": Family(QWEN, "<|im_end|>", _CHATML, (*_QWEN_ADDED, *_THINK)),
    "qwen coder": Family(QWEN_CODER, "<|im_end|>", _CHATML, _QWEN_ADDED),
    "llama": Family(
        LLAMA,
        "<|eot_id|>",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "mistral": Family(MISTRAL, "</s>", _MISTRAL_MARKS),
    "gemma": Family(GEMMA, "<end_of_turn>", _GEMMA_MARKS),
    "harmony": Family(
        HARMONY,
        "<|end|>",
        ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    ),
}
