"""Grammars of answers: the form's marks are tokens, and what a tool's texts say is text."""

import json

import pytest

from kvrecall.domain.answer.constraints import Constraint, ToolChoice
from workers.model.answer_formats import _FAMILIES
from workers.model.answer_grammar import build_grammars

FORMS = {row.name: row for _, row in _FAMILIES if row.grammar}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_a_mark_in_a_tools_texts_is_text(name: str) -> None:
    form = FORMS[name]
    tokens = {mark: 1000 + number for number, mark in enumerate(form.marks)}

    def count(text: str) -> int:
        schema = {
            "type": "object",
            "properties": {text: {"type": "string", "enum": [text, f"a{text}"]}},
            "required": [text],
        }
        tool = json.dumps({"function": {"name": f"f{text}", "parameters": schema, "strict": True}})
        constraint = Constraint(tool_choice=ToolChoice.REQUIRED)
        return build_grammars(constraint, [tool], form, tokens).whole.count("<[")

    assert count("".join(tokens)) == count("two words")
