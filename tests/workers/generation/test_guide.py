"""A guide begins behind the reasoning and at the marks of calls, in one token or several."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvrecall.domain.answer.constraints import Constraint, ToolChoice
from workers.errors import BadSettings
from workers.generation.guide import Guide, build_guide
from workers.model.grammars import Grammars
from workers.model.text_stream import TextStream
from workers.model.tokenizer import ChatTokenizer

REASONING = "<tool_call> <think></think>"
CODER = "<tool_call> <function= <parameter= "
LLAMA = '<|start_header_id|> "parameters"'
ARGS = "[TOOL_CALLS] [ARGS]"
TOOL = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "kind": {"type": "string", "const": "now"},
                    "at": {"$ref": "#/$defs/Place"},
                },
                "required": ["city", "at"],
                "$defs": {"Place": {"type": "integer"}},
            },
        },
    }
)
NUMBER = Constraint(schema='{"type": "integer"}')
REQUIRED = Constraint(tool_choice=ToolChoice.REQUIRED)


def make(tokenizer: ChatTokenizer, template: str, *tokens: str) -> ChatTokenizer:
    """The reference model's tokenizer with another chat template and tokens of its own."""
    inner = deepcopy(tokenizer.inner)
    inner.chat_template = template
    inner.add_special_tokens({"additional_special_tokens": list(tokens)})
    return ChatTokenizer(inner, tokenizer.eos_token_ids)


class Answer:
    """An answer on its way, with what may come next."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        constraint: Constraint,
        reasons: bool | None = None,
        tools: tuple[str, ...] = (TOOL,),
    ) -> None:
        self.tokenizer = tokenizer
        self.grammars = Grammars(tokenizer)
        self.stream = TextStream(tokenizer, reasons=reasons, tools=[json.loads(t) for t in tools])
        self.guide = build_guide(
            self.grammars,
            self.grammars.build(constraint, tools),
            constraint,
            tokenizer,
            self.stream,
        )

    def say(self, text: str) -> bool:
        """Generate a text; False where a token of it may not come."""
        return all(self.push(token) for token in self.tokenizer.encode(text))

    def push(self, token: int) -> bool:
        if not self.may(token):
            return False
        self.stream.push(token)
        if self.guide is not None:
            self.guide.accept(token)
        return True

    def may(self, token: int) -> bool:
        guide: Guide | None = self.guide
        if guide is None or not guide.active:
            return True
        words = np.zeros(-(-len(self.tokenizer.inner) // 32) + 4, np.int32)
        guide.fill(words)
        return bool(np.unpackbits(words.view(np.uint8), bitorder="little")[token])

    @property
    def may_end(self) -> bool:
        return self.may(self.tokenizer.eos_token_ids[0])


@pytest.mark.parametrize("tokens", [(), ("<think>", "</think>")])
def test_the_grammar_begins_behind_the_reasoning(
    tokens: tuple[str, ...], tokenizer: ChatTokenizer
) -> None:
    qwen = make(tokenizer, REASONING, *tokens)
    answer = Answer(qwen, NUMBER, reasons=True)
    assert answer.say("seven or so\n</think>\n\n")
    assert not answer.say("so")
    assert answer.say("42")
    assert answer.may_end


def test_a_model_may_begin_to_reason_before_a_constrained_answer(tokenizer: ChatTokenizer) -> None:
    qwen = make(tokenizer, REASONING, "<think>", "</think>")
    assert Answer(qwen, NUMBER).say("42")
    assert not Answer(qwen, NUMBER).say("I think")
    assert Answer(qwen, NUMBER).say("<think>hm</think>42")
    closed = Answer(qwen, NUMBER, reasons=False)
    assert not closed.say("<think>")


def test_a_mark_of_several_tokens_begins_the_grammar(tokenizer: ChatTokenizer) -> None:
    plain = ChatTokenizer(tokenizer.inner, tokenizer.eos_token_ids)
    assert plain.format.grammar is not None
    grammar = replace(plain.format.grammar, closing=("}}",), separator=None)
    form = replace(plain.format, mark="<call>", grammar=grammar)
    object.__setattr__(plain, "format", form)
    assert len(plain.encode("<call>")) > 1
    answer = Answer(plain, Constraint())
    assert answer.say('Let me see. <call>{"name": "')
    assert not answer.say("fly")
    assert answer.say('weather", "arguments": {"city": "Bern", "at": 4}}')
    assert answer.may_end
    assert not answer.say(" and")


def test_several_calls_may_follow_unless_one_is_asked_for(tokenizer: ChatTokenizer) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bern", "at": 4}}</tool_call>'
    assert Answer(tokenizer, Constraint()).say(call + "\n" + call)
    one = Answer(tokenizer, Constraint(single_call=True))
    assert one.say(call)
    assert one.may_end
    assert not one.say("\n" + call)


def test_parameters_in_tags_follow_the_schema(tokenizer: ChatTokenizer) -> None:
    coder = make(tokenizer, CODER)
    opening = "<tool_call>\n<function=weather>\n<parameter=city>\nBern <b>\n</parameter>\n"
    answer = Answer(coder, REQUIRED)
    assert not answer.say("Well")
    answer = Answer(coder, REQUIRED)
    assert answer.say(f"{opening}<parameter=unit>\n")
    assert not answer.say("K")
    answer = Answer(coder, REQUIRED)
    assert answer.say(f"{opening}<parameter=kind>\n")
    assert not answer.say("later")
    answer = Answer(coder, REQUIRED)
    assert answer.say(f"{opening}<parameter=at>\n4\n</parameter>\n</function>\n</tool_call>")
    assert answer.may_end
    assert [call.arguments for call in answer.stream.parse().calls] == [
        '{"city": "Bern <b>", "at": 4}'
    ]
    assert not Answer(coder, REQUIRED).say(f"{opening}</function>"), "at is missing"


@pytest.mark.parametrize(
    ("template", "tokens", "text"),
    [
        (LLAMA, ("<|python_tag|>",), '{"name": "weather", "parameters": {"city": "B", "at": 4}}'),
        (
            "[TOOL_CALLS]",
            ("[TOOL_CALLS]",),
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "B", "at": 4}}]',
        ),
        (ARGS, ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]weather[ARGS]{"city": "B", "at": 4}'),
    ],
)
def test_a_required_call_has_the_familys_form(
    template: str, tokens: tuple[str, ...], text: str, tokenizer: ChatTokenizer
) -> None:
    family = make(tokenizer, template, *tokens)
    answer = Answer(family, REQUIRED)
    assert answer.say(text)
    assert answer.may_end
    (call,) = answer.stream.parse().calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "B", "at": 4})
    assert not Answer(family, REQUIRED).say("Hello")


def test_the_mark_never_comes_where_no_tool_may_be_called(tokenizer: ChatTokenizer) -> None:
    none = Answer(tokenizer, Constraint(tool_choice=ToolChoice.NONE))
    assert none.say("plain text, <b> and all")
    assert not none.say("<tool_call>")


def test_no_guide_is_needed_without_tools_or_a_constraint(tokenizer: ChatTokenizer) -> None:
    assert Answer(tokenizer, Constraint(), tools=()).guide is None
    plain = make(tokenizer, "no calls")
    assert Answer(plain, Constraint()).guide is None
    with pytest.raises(BadSettings, match="not known"):
        Answer(plain, REQUIRED)


def test_grammars_are_compiled_once(tokenizer: ChatTokenizer) -> None:
    grammars = Grammars(tokenizer)
    first = grammars.build(NUMBER, (TOOL,))
    assert grammars.build(NUMBER, (TOOL,)) is first
    for number in range(256):
        grammars.build(Constraint(schema=json.dumps({"const": number})), ())
    assert grammars.build(NUMBER, (TOOL,)) is not first, "the oldest of 256 has gone"


def test_answers_begin_while_a_grammar_is_compiled_on_another_thread(
    tokenizer: ChatTokenizer,
) -> None:
    grammars = Grammars(tokenizer)
    known = grammars.build(NUMBER, (TOOL,))
    names = [f"p{number}" for number in range(4000)]
    texts = {name: {"type": "string", "pattern": "^(a|b){3,40}x?[a-z]{2,9}$"} for name in names}
    slow = Constraint(schema=json.dumps({"type": "object", "properties": texts, "required": names}))
    with ThreadPoolExecutor(1) as threads:
        compiling = threads.submit(grammars.build, slow, ())
        begun = []
        while not compiling.running():
            time.sleep(0)
        for _ in range(100):
            guide = build_guide(grammars, known, NUMBER, tokenizer, TextStream(tokenizer))
            time.sleep(0)
            begun.append(guide)
        assert not compiling.done(), "no answer waited for the grammar"
        assert compiling.result().whole is not None
    assert all(guide is not None and guide.active for guide in begun)


def test_a_grammar_that_fails_ends_its_own_answer_alone(tokenizer: ChatTokenizer) -> None:
    answer = Answer(tokenizer, NUMBER)
    guide: Any = answer.guide
    assert guide._matcher.consume_token(tokenizer.encode("x")[0]) is False
    other = Answer(tokenizer, NUMBER)
    assert isinstance(answer.may(5), bool), "the batch goes on"
    with pytest.raises(BadSettings, match="failed"):
        guide.require_sound()
    with pytest.raises(BadSettings, match="failed"):
        guide.accept(5)
    assert other.say("42")


def make_text_tool(grammar: str) -> str:
    """A tool whose one argument is a text that follows a grammar."""
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string", "x-grammar": grammar}},
        "required": ["input"],
    }
    return json.dumps({"function": {"name": "edit", "parameters": parameters}})


LINES = 'start: ("+" /.+/ LF)+ "end"\n%import common.LF'


def test_a_text_within_json_follows_its_own_grammar(tokenizer: ChatTokenizer) -> None:
    tools = (make_text_tool(LINES), TOOL)
    opening = '<tool_call>{"name": "edit", "arguments": {"input": "'
    answer = Answer(tokenizer, Constraint(), tools=tools)
    assert answer.say(opening)
    assert not answer.say("-")
    assert not answer.say("e")
    assert answer.say(r"+say \"so\"\n+\tC:\\x\nend")
    assert not answer.say("+")
    assert answer.say('"}}</tool_call>')
    assert answer.may_end
    other = Answer(tokenizer, Constraint(), tools=tools)
    assert other.say('<tool_call>{"name": "weather", "arguments": {"city": "Bern", "at": 4}}')


def test_a_text_between_tags_follows_its_own_grammar(tokenizer: ChatTokenizer) -> None:
    coder = make(tokenizer, CODER)
    answer = Answer(coder, Constraint(), tools=(make_text_tool(LINES),))
    assert answer.say("<tool_call>\n<function=edit>\n<parameter=input>\n")
    assert not answer.say("-")
    assert answer.say('+say "so"\n+more\nend')
    assert not answer.say("+")
    assert answer.say("\n</parameter>\n</function>\n</tool_call>")
    assert answer.may_end
