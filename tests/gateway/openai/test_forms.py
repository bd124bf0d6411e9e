"""The form of an answer under the names of OpenAI, vLLM and llama.cpp."""

import json
from typing import Any

import pytest

from gateway.openai.completions.schemas import CompletionBody
from gateway.openai.schemas import ChatCompletionBody
from kvrecall.domain.answer.constraints import Constraint
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Sampling

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"floor": {"const": 42}}, "required": ["floor"]}
HELLO = [{"role": "user", "content": "hello"}]
SAME_SCHEMA = [
    {"response_format": {"type": "json_object", "schema": SCHEMA}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
    {"json_schema": SCHEMA},
]
GRAMMARS = [
    ({"guided_regex": "a/b[0-9]+"}, r"start: /a\/b[0-9]+/"),
    ({"structured_outputs": {"regex": "[0-9]+"}}, "start: /[0-9]+/"),
    ({"guided_choice": ["yes", 'a "no"']}, r'start: "yes" | "a \"no\""'),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, 'start: "yes" | "no"'),
    ({"guided_grammar": 'start: "a"+'}, 'start: "a"+'),
    ({"grammar": 'root ::= "a"+'}, 'start: "a"+'),
    ({"structured_outputs": {"grammar": 'root ::= "a"+'}}, 'start: "a"+'),
]


def read(**body: Any) -> Constraint:
    """The constraint of a chat completion."""
    parsed = ChatCompletionBody.model_validate({"model": "m", "messages": HELLO, **body})
    sampling = parsed.turn_to_domain(ServiceLimits(), Sampling()).sampling
    assert sampling is not None
    return sampling.constraint


@pytest.mark.parametrize("body", SAME_SCHEMA)
def test_a_schema_has_many_names(body: Json) -> None:
    assert read(**body) == Constraint(schema=json.dumps(SCHEMA))
    completion = CompletionBody.model_validate({"model": "m", "prompt": "a", **body})
    sampling = completion.turn_to_domain(ServiceLimits(), Sampling()).sampling
    assert sampling is not None
    assert sampling.constraint.schema == json.dumps(SCHEMA)


@pytest.mark.parametrize(("body", "grammar"), GRAMMARS)
def test_expressions_choices_and_grammars_become_one_grammar(body: Json, grammar: str) -> None:
    constraint = read(**body)
    assert constraint.grammar.strip() == grammar
    assert constraint.schema == ""


@pytest.mark.parametrize("body", [{"grammar": ""}, {"structured_outputs": {"json_object": False}}])
def test_nothing_asked_for_is_free_text(body: Json) -> None:
    assert read(**body) == Constraint()


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex", "exclude each other"),
        (
            {"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'},
            "grammar",
            "response_format and grammar exclude each other",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "exc",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "one",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "a list of 1 to"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "a regular expression"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "a JSON schema"),
        ({"guided_json": "{"}, "guided_json", "is no JSON"),
        ({"guided_regex": "(a"}, "grammar", "cannot be followed"),
        ({"grammar": "root ::= ("}, "grammar", "cannot be read"),
        ({"guided_grammar": "start: <|im_end|>"}, "guided_grammar", "not supported"),
        ({"guided_choice": "yes"}, "guided_choice", "list"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_is_no_form_is_refused_by_name(
    api: Any, path: str, body: Json, field: str, words: str
) -> None:
    asked = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
    response = await api.http.post(path, json={"model": api.service.info.model, **asked, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert words in error["message"]
    assert await api.catalog.sessions.get_ids() == []
