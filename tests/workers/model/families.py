"""Chat templates in the forms of model families, with the marks that their vocabularies have.

Each renders every member that a message, a call, a tool and a document have.
"""

from dataclasses import dataclass

from tests.workers.model import test_rendering, test_tokenizer, test_tool_messages
from tests.workers.model.weights import test_gguf


@dataclass(frozen=True)
class Family:
    """A template, its ends of turn, and the vocabulary's tokens that are special or only added."""

    template: str
    end: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    other_ends: tuple[str, ...] = ()


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

_GIVEN = """{%- for tool in tools or [] %}
{{ tool | tojson }}{% endfor %}
{%- for each in documents or [] %}
{{ each.title }}: {{ each.text }} {{ each.tags | tojson }}{% endfor %}"""

# One call a message; the text before it is reasoning until the conversation has an answer behind it.
GPT_OSS = (
    "<|start|>system<|message|>"
    + _GIVEN
    + """<|end|>
{%- set called = namespace(name='') -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and 'tool_calls' in message -%}
{%- set answered = namespace(found=false) -%}
{%- for later in messages[loop.index:] -%}
{%- if later.role == 'assistant' and 'tool_calls' not in later -%}
{%- set answered.found = true -%}{%- endif -%}
{%- endfor -%}
{%- if message.content and not answered.found -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- set call = message.tool_calls[0].function -%}{%- set called.name = call.name -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>
{{- message.content | tojson }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.name }}{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{% endif -%}"""
)
_GPT_OSS_MARKS = (
    *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>"),
    "<|return|>",
)


def _write_turns(calls: str, result: str) -> str:
    """A template in ChatML's form, with a family's own calls and results."""
    return (
        "<|im_start|>system"
        + _GIVEN
        + """<|im_end|>
{%- for message in messages -%}
{%- if message.role == 'tool' -%}RESULT
{%- else -%}
<|im_start|>{{ message.role }} {{ message.name }}
{{ message.content }}
{%- if message.tool_calls -%}CALLS{%- endif -%}
{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}""".replace("CALLS", calls).replace("RESULT", result)
    )


_ENVIRONMENT = "<|im_start|>environment\n{{ message.tool_call_id }}{{ message.content }}"
_ARGUMENTS = """{%- if call.function.arguments is mapping -%}
{%- for name, value in call.function.arguments.items() -%}PARAMETER{%- endfor -%}
{%- endif -%}"""
_PROGRAM = "{{ call.function.name }}(" + _ARGUMENTS.replace(
    "PARAMETER", "{{ name }}={{ value | tojson }}{{ ', ' if not loop.last }}"
)
# Arguments are texts: an object can't be added to one.
DEEPSEEK = _write_turns(
    """<｜tool▁calls▁begin｜>{%- for call in message.tool_calls -%}
<｜tool▁call▁begin｜>{{ call.function.name + '<｜tool▁sep｜>' + call.function.arguments -}}
<｜tool▁call▁end｜>{%- endfor -%}<｜tool▁calls▁end｜>""",
    "<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>",
)
_DEEPSEEK_MARKS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
KIMI = _write_turns(
    """<|tool_calls_section_begin|>{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}<|tool_calls_section_end|>""",
    "<|im_start|>tool\n## Return of {{ message.tool_call_id }}\n{{ message.content }}",
)
_KIMI_MARKS = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
GLM = _write_turns(
    "{%- for call in message.tool_calls %}\n<tool_call>{{ call.function.name }}\n"
    + _ARGUMENTS.replace(
        "PARAMETER",
        "<arg_key>{{ name }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}"
        "</arg_value>\n",
    )
    + "</tool_call>{%- endfor -%}",
    "<|im_start|>tool\n<tool_response>\n{{ message.content }}\n</tool_response>",
)
MINIMAX = _write_turns(
    "\n<minimax:tool_call>\n{%- for call in message.tool_calls -%}"
    '<invoke name="{{ call.function.name }}">\n'
    + _ARGUMENTS.replace(
        "PARAMETER",
        '<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>\n',
    )
    + "</invoke>\n{%- endfor -%}</minimax:tool_call>",
    "<|im_start|>tool\n<response>{{ message.content }}</response>",
)
_LISTED = """{%- for call in message.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{{- ', ' if not loop.last }}{%- endfor -%}"""
GRANITE = _write_turns(f"<|tool_call|>[{_LISTED}]", _ENVIRONMENT)
NEMOTRON = _write_turns(
    f"<TOOLCALL>[{_LISTED}]</TOOLCALL>",
    "<|im_start|>user\n<TOOL_RESPONSE>[{{ message.content }}]</TOOL_RESPONSE>",
)
LFM2 = _write_turns(
    "<|tool_call_start|>[{%- for call in message.tool_calls -%}"
    + _PROGRAM
    + "){{ ', ' if not loop.last }}{%- endfor -%}]<|tool_call_end|>",
    "<|im_start|>tool\n<|tool_response_start|>{{ message.content }}<|tool_response_end|>",
)
OLMO = _write_turns(
    "<function_calls>{%- for call in message.tool_calls -%}"
    + _PROGRAM
    + ")\n{%- endfor -%}</function_calls>",
    _ENVIRONMENT,
)
LLAMA4 = LLAMA.replace("start_header_id", "header_start").replace("end_header_id", "header_end")
LLAMA4 = LLAMA4.replace("<|eot_id|>", "<|eot|>").replace("<|python_tag|>", "")
_GEMMA4_NAMES = {
    "<start_function_call>": "<|tool_call>call:",
    "<end_function_call>": "<tool_call|>",
    "<start_function_declaration>": "<|tool>declaration:",
    "<end_function_declaration>": "<tool|>",
    "<start_function_response>": "<|tool_response>response:",
    "<end_function_response>": "<tool_response|>",
    "<escape>": '<|"|>',
    "<start_of_turn>": "<|turn>",
    "<end_of_turn>": "<turn|>",
}
GEMMA4 = GEMMA
for _old, _new in _GEMMA4_NAMES.items():
    GEMMA4 = GEMMA4.replace(_old, _new)
_GEMMA4_MARKS = (
    *("<bos>", "<|turn>", "<|tool_call>", "<tool_call|>", "<|tool>", "<tool|>", '<|"|>'),
    *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>"),
)

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
    "gpt-oss": Family(GPT_OSS, "<|return|>", _GPT_OSS_MARKS, other_ends=("<|call|>",)),
    "deepseek": Family(DEEPSEEK, "<|im_end|>", (*_CHATML, *_DEEPSEEK_MARKS), _THINK),
    "kimi": Family(KIMI, "<|im_end|>", (*_CHATML, *_KIMI_MARKS), _THINK),
    "glm": Family(
        GLM,
        "<|im_end|>",
        _CHATML,
        (*_QWEN_ADDED, *_THINK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "minimax": Family(
        MINIMAX, "<|im_end|>", _CHATML, ("<minimax:tool_call>", "</minimax:tool_call>")
    ),
    "granite": Family(GRANITE, "<|im_end|>", (*_CHATML, "<|tool_call|>")),
    "nemotron": Family(NEMOTRON, "<|im_end|>", _CHATML),
    "lfm2": Family(
        LFM2,
        "<|im_end|>",
        (
            *(*_CHATML, "<|tool_call_start|>", "<|tool_call_end|>"),
            *("<|tool_response_start|>", "<|tool_response_end|>"),
        ),
    ),
    "olmo": Family(OLMO, "<|im_end|>", _CHATML),
    "llama4": Family(
        LLAMA4,
        "<|eot|>",
        (
            *("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|python_start|>"),
            "<|python_end|>",
        ),
    ),
    "gemma4": Family(GEMMA4, "<turn|>", _GEMMA4_MARKS),
}
