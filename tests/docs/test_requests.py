"""Requests shown in README and docs.

Their routes exist, and their bodies have fields of the API.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.rest.schemas.research import ResearchBody

ROOT = Path(__file__).parents[2]
API = json.loads((ROOT / "docs" / "reference" / "openapi.json").read_text(encoding="utf-8"))
PAGES = [
    "README.md",
    "docs/quickstart.md",
    *(f"docs/how-to/{n.name}" for n in sorted((ROOT / "docs/how-to").glob("*.md"))),
]


def requests() -> Iterator[tuple[str, str, Any]]:
    """Page, path and JSON body of each curl call with a body.

    `event` is the pages' own function.
    """
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^.*curl .* -d '.*$", text, re.M):
            path = re.search(r"(/v1/\S*|\$S/\w+)", line)
            assert path is not None, line
            body = re.search(r"-d '([^']*)'", line)
            assert body is not None, line
            route = re.sub(r"\$S(?=/)", "/v1/sessions/{session}", path[1])
            route = re.sub(
                r"\$SESSION|/SESSION(?=/)",
                lambda m: "/{session}" if m[0][0] == "/" else "{session}",
                route,
            )
            yield page, route, json.loads(body[1])
        for body_text in re.findall(r"^event '(.*)'$", text, re.M):
            yield page, "/v1/sessions/{session}/events", json.loads(body_text)


def properties(schema: dict[str, Any], body: Any) -> set[str]:
    """Fields of a schema; of a union, those of the member for the body's type."""
    if ref := schema.get("$ref"):
        return properties(API["components"]["schemas"][ref.rpartition("/")[2]], body)
    if mapping := schema.get("discriminator", {}).get("mapping"):
        return properties({"$ref": mapping[body["type"]]}, body)
    return set(schema["properties"])


def body_schema(route: str) -> dict[str, Any]:
    """The schema of a route's body; of an optional body, that of a body that is there."""
    content = API["paths"][route]["post"]["requestBody"]["content"]["application/json"]
    schema: dict[str, Any] = content["schema"]
    choices = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return choices[0] if choices else schema


@pytest.mark.parametrize(("page", "route", "body"), list(requests()))
def test_a_request_of_the_docs_has_a_route_and_fields_that_exist(
    page: str, route: str, body: dict[str, Any]
) -> None:
    assert route in API["paths"], page
    assert set(body) <= properties(body_schema(route), body)


def test_options_of_the_page_on_tool_calls_are_options_of_a_session() -> None:
    fields = set(ResearchBody.model_fields)
    text = (ROOT / "docs/how-to/tool-calls.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert named
    assert set(named) <= fields
