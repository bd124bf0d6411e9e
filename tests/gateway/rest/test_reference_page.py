"""The page of the API's reference: every operation and schema, confined, and every link leads somewhere."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

from gateway.rest.reference_page import describe_type, render


class Page(HTMLParser):
    """The ids, links, tags and style of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.style = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data


async def test_the_page_has_every_operation_and_schema(api: Any) -> None:
    answer = await api.http.get("/docs")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    description = (await api.http.get("/openapi.json")).json()
    page = Page(answer.text)
    assert not page.open
    operations = [
        f"{method.upper()}-{path}"
        for path, methods in description["paths"].items()
        for method in methods
    ]
    assert sorted(page.ids) == sorted([*operations, *description["components"]["schemas"]])
    assert {link.removeprefix("#") for link in page.links} <= {*page.ids, "openapi.json"}


async def test_the_page_runs_and_loads_nothing(api: Any) -> None:
    answer = await api.http.get("/docs")
    page = Page(answer.text)
    assert not page.tags & {"script", "img", "link", "iframe", "form", "object"}
    assert not re.search(r"\s(on\w+|style)=", answer.text)
    policy = answer.headers["content-security-policy"]
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_what_a_description_says_is_text() -> None:
    evil = '<script>alert("x")</script>'
    schema = {"type": "object", "description": evil, "properties": {evil: {"type": evil}}}
    parameter = {"name": evil, "in": evil, "schema": {"enum": [evil]}, "description": evil}
    responses = {evil: {"description": evil, "content": {evil: {"schema": {"$ref": evil}}}}}
    operation = {"description": evil, "parameters": [parameter], "responses": responses}
    page = render(
        {
            "info": {"title": evil, "version": evil, "description": evil},
            "paths": {evil: {"get": operation}},
            "components": {"schemas": {evil: schema}},
        }
    )
    assert "<script" not in page


def test_types_are_described_with_links() -> None:
    ref = {"$ref": "#/components/schemas/Turn"}
    link = '<a href="#Turn">Turn</a>'
    assert describe_type({"anyOf": [ref, {"type": "null"}]}) == f"{link} or null"
    assert describe_type({"type": "array", "items": ref}) == f"list of {link}"
    assert describe_type({"enum": ["a", "b"]}) == "<code>a</code>, <code>b</code>"
    assert describe_type({}) == "any"
