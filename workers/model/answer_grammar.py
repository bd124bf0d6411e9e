"""Grammars of constrained answers, as llguidance reads them (Lark), by the model's own form of calls.

A mark that is one token of the vocabulary is written as this token: as text it would never match. A
text that follows a grammar of its own is a grammar beside it, so that their names are apart.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.domain.answer.constraints import (
    TEXT_GRAMMAR,
    Constraint,
    ToolChoice,
    find_text_grammar,
    get_tool,
    to_grammar_schema,
)
from kvrecall.domain.answer.text_grammars import close_grammar, quote_grammar
from workers.client_json import read_json
from workers.errors import BadSettings
from workers.model.answer_formats import LINE, AnswerFormat, CallGrammar
from workers.model.call_parsing import is_text

# Members of a schema that its parts may refer to.
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class AnswerGrammars:
    """Texts of one constraint's grammars (see `CompiledGrammars`); empty where the answer is free."""

    whole: str = ""
    behind_mark: str = ""


@dataclass
class _Rules:
    """Rules of a grammar, under names of their own. `tokens`: ids of the tokens that are marks."""

    tokens: Mapping[str, int]
    lines: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def json(self, schema: dict[str, Any], strict: bool) -> str:
        """Add the rule of a JSON value; returns its name."""
        return self.add(f"%json {json.dumps(to_grammar_schema(schema, strict))}")

    def nest(self, grammar: str) -> str:
        """Add a grammar of its own; returns the reference to it."""
        self.texts.append(grammar)
        return f"@text{len(self.texts) - 1}"

    def text(self, *pieces: str) -> str:
        """Write pieces of text, with marks as their tokens."""
        written: list[str] = []
        for piece in pieces:
            if piece == LINE:
                written.append("/\\n?/")
                continue
            pattern = "|".join(map(re.escape, self.tokens)) or "(?!)"
            for part in re.split(f"({pattern})", piece):
                if part in self.tokens:
                    written.append(f"<[{self.tokens[part]}]>")
                elif part:
                    written.append(json.dumps(part))
        return " ".join(written)

    def framed(self, before: str, plain: str, after: str) -> str:
        """Write a client's text between two of the form's: a mark in it is text like any other."""
        return " ".join(filter(None, (self.text(before), json.dumps(plain), self.text(after))))


def build_grammars(
    constraint: Constraint,
    tools: Sequence[str],
    form: AnswerFormat,
    tokens: Mapping[str, int],
) -> AnswerGrammars:
    """Build the grammars of an answer.

    tools: JSON texts of the session's tools; tokens: ids of the vocabulary's tokens that are marks.
    Without a known form of calls, answers that may call tools are free. Raises BadSettings where
    one has to, or for a tool that the session has not.
    """
    chosen = _choose(constraint, tools)
    rules = _Rules(tokens)
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
    if constraint.tool_choice is ToolChoice.REQUIRED:
        return AnswerGrammars(_join(rules, f"{lead}{opened} {calls}"))
    if constraint.schema or constraint.grammar:
        answer = (
            rules.json(read_json("the schema of the answer", constraint.schema), constraint.strict)
            if constraint.schema
            else rules.nest(constraint.grammar)
        )
        either = f"({answer} | {rules.text(form.mark)} {calls})" if calls else answer
        return AnswerGrammars(_join(rules, f"{lead}{either}"))
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


def _join(rules: _Rules, start: str) -> str:
    grammar = "\n".join([f"start: {start}", *rules.lines])
    if not rules.texts:
        return grammar
    texts = [{"name": f"text{n}", "lark_grammar": text} for n, text in enumerate(rules.texts)]
    return json.dumps({"grammars": [{"lark_grammar": grammar}, *texts]})


def _add_calls(rules: _Rules, grammar: CallGrammar, tools: Sequence[_Tool], single: bool) -> str:
    """Add the rule of the calls behind the first mark; returns its name."""
    call = rules.add(" | ".join(_add_call(rules, grammar, tool) for tool in tools))
    following = ""
    if grammar.separator is not None and not single:
        following = f"({rules.text(*grammar.separator)} {call})*"
    return rules.add(f"{rules.text(grammar.before)} {call} {following} {rules.text(grammar.after)}")


def _add_call(rules: _Rules, grammar: CallGrammar, tool: _Tool) -> str:
    name = tool.name if grammar.xml else json.dumps(tool.name)[1:-1]
    opening = " ".join(_write_opening(rules, piece, name) for piece in grammar.opening)
    closing = [piece.format() for piece in grammar.closing]
    arguments = _add_parameters(rules, tool) if grammar.xml else _add_arguments(rules, tool)
    return rules.add(f"{opening} {arguments} {rules.text(*closing)}")


def _write_opening(rules: _Rules, piece: str, name: str) -> str:
    before, named, after = piece.partition("{name}")
    if not named:
        return rules.text(piece if piece == LINE else piece.format())
    return rules.framed(before.format(), name, after.format())


def _add_arguments(rules: _Rules, tool: _Tool) -> str:
    """Add the rule of a call's arguments as a JSON object; returns its name."""
    found = find_text_grammar(tool.schema)
    if found is None:
        return rules.json(tool.schema, tool.strict)
    name, grammar = found
    opening = rules.framed("{", json.dumps(name), ': "')
    return rules.add(f"{opening} {rules.nest(quote_grammar(grammar))} {rules.text(chr(34) + '}')}")


def _add_parameters(rules: _Rules, tool: _Tool) -> str:
    """Add the rule of a call's parameters in tags, in the order of the schema; returns its name."""
    properties = tool.schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    required = tool.schema.get("required") or ()
    shared = {key: value for key, value in tool.schema.items() if key in _DEFINITIONS}
    pieces = []
    for key, schema in properties.items():
        schema = schema if isinstance(schema, dict) else {}
        opening = rules.framed("<parameter=", key, ">\n")
        closing = "\n</parameter>\n"
        choices = [schema["const"]] if "const" in schema else schema.get("enum") or ()
        if is_text(schema) and isinstance(grammar := schema.get(TEXT_GRAMMAR), str):
            rule = f"{opening} {rules.nest(close_grammar(grammar, closing))}"
        elif is_text(schema) and not choices:
            # The text ends where its tag does, whatever it is.
            value = rules.add("/(?s:.*)/", f"[suffix={json.dumps(closing)}]")
            rule = f"{opening} {value}"
        elif is_text(schema):
            value = " | ".join(json.dumps(str(choice)) for choice in choices)
            rule = f"{opening} ({value}) {rules.text(closing)}"
        else:
            value = rules.json({**shared, **schema}, tool.strict)
            rule = f"{opening} {value} {rules.text(closing)}"
        pieces.append(rules.add(rule) + ("" if key in required else "?"))
    return rules.add(" ".join(pieces) or '""')
