"""The API's reference as a page: the OpenAPI description as HTML, without scripts or other files."""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
code, h3, summary { font-family: ui-monospace, monospace; }
h3 { margin: 2rem 0 0.25rem; font-size: 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; }
td { border-top: 1px solid #8886; overflow-wrap: anywhere; }
nav ul { columns: 22rem; padding-left: 1rem; }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of the page: it may run nothing, load nothing and be framed by nobody."""


def render(description: Json) -> str:
    """Render an OpenAPI description as an HTML page."""
    operations = [
        (method.upper(), path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = description["components"]["schemas"]
    info = description["info"]
    title = f"{info['title']} {info['version']}"
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f'<p>{escape(info.get("description", ""))} The same for programs: <a href="openapi.json">'
        "openapi.json</a>.</p><nav><h2>Operations</h2><ul>",
        *(f"<li>{_link(_name(method, path))}</li>" for method, path, _ in operations),
        "</ul></nav><main>",
        *(_render_operation(*operation) for operation in operations),
        "<h2>Schemas</h2>",
        *(_render_schema(name, schema) for name, schema in sorted(schemas.items())),
        "</main></body></html>",
    ]
    return "".join(parts)


def describe_type(schema: Json) -> str:
    """Describe a schema's type in HTML, with links to the schemas that it names."""
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return " or ".join(describe_type(each) for each in schema[word])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(str(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {describe_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))


def _render_operation(method: str, path: str, operation: Json) -> str:
    name = _name(method, path)
    body = operation.get("requestBody", {}).get("content", {})
    answers = [
        [f"<code>{escape(status)}</code>", escape(answer["description"]), _describe_content(answer)]
        for status, answer in operation["responses"].items()
    ]
    parameters = [
        [
            f"<code>{escape(each['name'])}</code>",
            escape(each["in"]),
            describe_type(each["schema"]),
            escape(each.get("description", "")),
        ]
        for each in operation.get("parameters", ())
    ]
    return "".join(
        [
            f'<h3 id="{_anchor(name)}">{escape(name)}</h3>',
            f"<p>{escape(operation.get('description', operation.get('summary', '')))}</p>",
            _render_table(["parameter", "in", "type", ""], parameters),
            f"<p>Body: {_describe_content({'content': body})}</p>" if body else "",
            _render_table(["answer", "", "body"], answers),
        ]
    )


def _render_schema(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    fields = [
        [
            f"<code>{escape(field)}</code>",
            describe_type(values),
            "required" if field in required else "",
            escape(values.get("description", "")),
        ]
        for field, values in schema.get("properties", {}).items()
    ]
    return (
        f'<h3 id="{_anchor(name)}">{escape(name)}</h3>'
        f"<p>{escape(schema.get('description', ''))}</p>"
        f"{_render_table(['field', 'type', '', ''], fields)}"
    )


def _describe_content(answer: Json) -> str:
    found = [
        f"{describe_type(content.get('schema', {}))} ({escape(media)})"
        for media, content in answer.get("content", {}).items()
    ]
    return "; ".join(found)


def _render_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Render a table of cells in HTML; nothing without rows."""
    lines = ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    if not lines:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _name(method: str, path: str) -> str:
    return f"{method} {path}"


def _link(name: str) -> str:
    return f'<a href="#{_anchor(name)}">{escape(name)}</a>'


def _anchor(name: str) -> str:
    """Return the id of a heading: its name without what an id must not have."""
    return escape(name.replace(" ", "-"))
