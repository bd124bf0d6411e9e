"""Grammars of constrained answers, as llguidance reads them (Lark), by the model's own form of calls.

A mark that is one token of the vocabulary is written as this token: as text it would never match. A
text that follows a grammar of its own is a grammar beside it, so that their names are apart.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrecall.domain.answer.constraints import (
    TEXT_GRAMMAR,
    Constraint,
    ToolChoice,
    find_text_grammar,
    get_tool,
)
from kvrecall.domain.answer.text_grammars import close_grammar, quote_grammar
from workers.client_json import read_json
from workers.errors import BadSettings
from workers.model.answer_format import AnswerFormat, Channels
from workers.model.calls.grammar import CallGrammar, Parameters
from workers.model.calls.tools import is_text
from workers.model.grammar_rules import PATTERNS, Rules
from workers.model.raw_values import RawValues

# Members of a schema that its parts may refer to.
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class AnswerGrammars:
    """Texts of one constraint's grammars (see `CompiledGrammars`); empty where the answer is free."""

    whole: str = ""
    behind_mark: str = ""


def build_grammars(
    constraint: Constraint,
    tools: Sequence[str],
    form: AnswerFormat,
    tokens: Mapping[str, int],
    special: Collection[str] = (),
) -> AnswerGrammars:
    """Build the grammars of an answer.

    tools: JSON texts of the session's tools; tokens: ids of the vocabulary's tokens that are marks;
    special: those of them that are special ones.
    Without a known form of calls, answers that may call tools are free. Raises BadSettings where
    one has to, or for a tool that the session has not.
    """
    chosen = _choose(constraint, tools)
    rules = Rules(tokens, special)
    calls = ""
    if constraint.tool_choice is not ToolChoice.NONE and chosen and form.grammar is not None:
        calls = _add_calls(rules, form.grammar, chosen, constraint.single_call)
    if constraint.tool_choice is ToolChoice.REQUIRED and not calls:
        raise BadSettings(
            "tool_choice requires a call, but the session has no tools"
            if not chosen
            else "tool_choice requires a call, but the form of this model's calls is not known"
        )
    opened = "" if form.bare else rules.text(form.mark)
    lead = "/\\n{0,2}/ " if form.reasoning else ""
    said = ""
    if form.channels is not None:
        lead, said = _add_lead(rules, form.channels), rules.text(form.channels.text)
        opened = rules.text(form.channels.call + form.mark)
    if constraint.tool_choice is ToolChoice.REQUIRED:
        return AnswerGrammars(_join(rules, f"{lead}{opened} {calls}"))
    if constraint.schema or constraint.grammar:
        answer = (
            rules.json(read_json("the schema of the answer", constraint.schema), constraint.strict)
            if constraint.schema
            else rules.nest(constraint.grammar)
        )
        answer = f"{said} {answer}"
        if calls:
            answer = f"({answer} | {opened or rules.text(form.mark)} {calls})"
        return AnswerGrammars(_join(rules, f"{lead}{answer}"))
    return AnswerGrammars(behind_mark=_join(rules, calls) if calls else "")


@dataclass(frozen=True)
class _Tool:
    name: str
    schema: dict[str, Any]
    strict: bool


def _choose(constraint: Constraint, tools: Sequence[str]) -> list[_Tool]:
    known = [_Tool(*get_tool(text)) for text in tools]
    missing = set(constraint.tools) - {tool.name for tool in known}
    if missing:
        raise BadSettings(f"the session has no tool {min(missing)!r}")
    return [tool for tool in known if not constraint.tools or tool.name in constraint.tools]


def _join(rules: Rules, start: str) -> str:
    grammar = "\n".join([f"start: {start}", *rules.lines])
    if not rules.texts:
        return grammar
    texts = [{"name": f"text{n}", "lark_grammar": text} for n, text in enumerate(rules.texts)]
    return json.dumps({"grammars": [{"lark_grammar": grammar}, *texts]})


def _add_lead(rules: Rules, channels: Channels) -> str:
    """Add the rule of messages that reason, before the answer's; returns it with any number of them."""
    opening, closing = channels.reasoning
    return f"({rules.text(opening)} {rules.any_until(closing)})* "


def _add_calls(rules: Rules, grammar: CallGrammar, tools: Sequence[_Tool], single: bool) -> str:
    """Add the rule of the calls behind the first mark; returns its name."""
    call = rules.add(" | ".join(_add_call(rules, grammar, tool) for tool in tools))
    following = ""
    if grammar.separator is not None and not single:
        following = f"({rules.text(*grammar.separator)} {call})*"
    return rules.add(f"{rules.text(grammar.before)} {call} {following} {rules.text(grammar.after)}")


def _add_call(rules: Rules, grammar: CallGrammar, tool: _Tool) -> str:
    own = grammar.parameters
    name = tool.name if own or grammar.quote else json.dumps(tool.name)[1:-1]
    opening = " ".join(_write_opening(rules, piece, name) for piece in grammar.opening)
    closing = [piece.format() for piece in grammar.closing]
    if grammar.quote:
        arguments = RawValues(rules, grammar.quote, tool.schema, strict=tool.strict).add()
    else:
        arguments = _add_parameters(rules, tool, own) if own else _add_arguments(rules, tool)
    return rules.add(f"{opening} {arguments} {rules.text(*closing)}")


def _write_opening(rules: Rules, piece: str, name: str) -> str:
    before, named, after = piece.partition("{name}")
    if not named:
        return rules.text(piece if piece in PATTERNS else piece.format())
    return rules.framed(before.format(), name, after.format())


def _add_arguments(rules: Rules, tool: _Tool) -> str:
    """Add the rule of a call's arguments as a JSON object; returns its name."""
    found = find_text_grammar(tool.schema)
    if found is None:
        return rules.json(tool.schema, tool.strict)
    name, grammar = found
    opening = rules.framed("{", json.dumps(name), ': "')
    return rules.add(f"{opening} {rules.nest(quote_grammar(grammar))} {rules.text(chr(34) + '}')}")


def _add_parameters(rules: Rules, tool: _Tool, form: Parameters) -> str:
    """Add the rule of a call's parameters, in the order of the schema; returns its name."""
    properties = tool.schema.get("properties")
    required = tool.schema.get("required") or ()
    members = [
        (_add_parameter(rules, tool, form, key, schema), key in required)
        for key, schema in (properties.items() if isinstance(properties, dict) else ())
    ]
    return rules.members(members, form.separator)


def _add_parameter(rules: Rules, tool: _Tool, form: Parameters, key: str, schema: Any) -> str:
    """Add the rule of one parameter; returns its name."""
    schema = schema if isinstance(schema, dict) else {}
    opening = rules.framed(form.before, key, form.between)
    closing = form.after
    choices = [schema["const"]] if "const" in schema else schema.get("enum") or ()
    grammar = schema.get(TEXT_GRAMMAR) if is_text(schema) else None
    if isinstance(grammar, str) and form.quoted:
        value = f"{rules.text(chr(34))} {rules.nest(quote_grammar(grammar))} {rules.text(chr(34))}"
    elif isinstance(grammar, str):
        return rules.add(f"{opening} {rules.nest(close_grammar(grammar, closing))}")
    elif is_text(schema) and not choices and not form.quoted:
        return rules.add(f"{opening} {rules.any_until(closing)}")
    elif is_text(schema) and not form.quoted:
        value = f"({' | '.join(json.dumps(str(choice)) for choice in choices)})"
    else:
        shared = {key: value for key, value in tool.schema.items() if key in _DEFINITIONS}
        value = rules.json({**shared, **schema}, tool.strict)
    return rules.add(f"{opening} {value} {rules.text(closing)}")
