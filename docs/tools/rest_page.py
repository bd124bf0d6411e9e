"""The OpenAPI description of the REST API, and its page: routes by tag, then schemas."""

import asyncio
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tables import to_table

Json = Mapping[str, Any]

INTRODUCTION = """# REST API

Generated from [openapi.json](openapi.json), which a running service also has at `/openapi.json`;
`/docs` shows it in a browser. Bodies are JSON; unknown fields are refused. Writes take an
`Idempotency-Key` header: a request that is sent again with its key is answered as it was, once.
A service with [keys](../keys.md) wants one in each request: `Authorization: Bearer KEY`.
Errors are problem documents (RFC 9457) with a stable `code`; see [`Problem`](#problem). Routes of
[OpenAI's](../openai.md) and [Anthropic's](../anthropic.md) APIs are as these pages describe them.
"""


def describe_api(root: Path) -> dict[str, Any]:
    """The OpenAPI description. Its version is the project's, not that of an installed copy."""
    described = asyncio.run(_describe_routes())
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    described["info"]["version"] = project["version"]
    return described


async def _describe_routes() -> dict[str, Any]:
    from gateway.app import create_app
    from gateway.http.settings import GatewaySettings
    from kvrecall.domain.limits import ServiceLimits
    from kvrecall_server.testing import open_catalog
    from services.cluster.worker_client import Worker
    from services.service import SessionService

    # Describing calls no worker: the service is never started.
    async with open_catalog() as catalog:
        service = SessionService(cast("Worker", None), catalog, ServiceLimits())
        return create_app(service, GatewaySettings()).openapi()


def build(api: Json) -> str:
    """The page's text."""
    by_tag: dict[str, list[str]] = defaultdict(list)
    for path, operations in api["paths"].items():
        for verb, operation in operations.items():
            by_tag[(operation.get("tags") or ["other"])[0]].append(to_route(path, verb, operation))
    parts = [INTRODUCTION]
    for tag, routes in by_tag.items():
        parts += [f"## {tag.capitalize()}\n", *routes]
    parts.append("## Schemas\n")
    parts += [to_schema(name, each) for name, each in sorted(api["components"]["schemas"].items())]
    return "\n".join(parts)


def to_route(path: str, verb: str, operation: Json) -> str:
    """A section of one route."""
    lines = [f"### `{verb.upper()} {path}`\n", f"{operation.get('description', '')}\n"]
    rows = [
        [f"`{each['name']}`", each["in"], describe_type(each["schema"]), describe_field(each)]
        for each in operation.get("parameters", ())
    ]
    lines.append(to_table(["parameter", "in", "type", ""], rows))
    if body := operation.get("requestBody"):
        lines.append(f"Body: {describe_content(body['content'])}\n")
    for status, response in operation.get("responses", {}).items():
        if status.startswith("2"):
            lines.append(f"Answers {status}: {describe_content(response.get('content', {}))}\n")
    problems = sorted(s for s in operation.get("responses", {}) if not s.startswith("2"))
    lines.append(f"Problems: {', '.join(problems)}.\n" if problems else "")
    return "\n".join(line for line in lines if line)


def describe_content(content: Json) -> str:
    """The schemas of a body, by media type."""
    shown = [
        describe_type(each.get("schema", {})) + ("" if kind == "application/json" else f" ({kind})")
        for kind, each in content.items()
    ]
    return "; ".join(shown) + "." if shown else "no content."


def to_schema(name: str, schema: Json) -> str:
    """A section of one schema: its fields."""
    required = set(schema.get("required", ()))
    rows = [
        [f"`{field}`", describe_type(each), *presence(field, each, required), describe_field(each)]
        for field, each in schema.get("properties", {}).items()
    ]
    table = to_table(["field", "type", "default", ""], rows)
    values = ", ".join(f"`{value}`" for value in schema.get("enum", ()))
    parts = (f"### {name}", schema.get("description", ""), values, table.rstrip())
    return "\n\n".join(part for part in parts if part) + "\n"


def presence(field: str, schema: Json, required: set[str]) -> Iterator[str]:
    """The default of a field, or that it is required."""
    if field in required:
        yield "required"
    else:
        default = schema.get("default")
        yield (
            ""
            if default is None
            else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )


def describe_field(schema: Json) -> str:
    """Description and bounds of a field or a parameter."""
    inner = schema.get("schema", schema)
    choices = [inner, *inner.get("anyOf", ())]
    bounds = [
        f"{sign} {to_number(each[name])}"
        for each in choices
        for name, sign in BOUNDS
        if name in each
    ]
    text = schema.get("description") or inner.get("description") or ""
    return " ".join([text, f"({', '.join(bounds)})"] if bounds else [text]).strip()


def to_number(value: float) -> str:
    """A bound without a fraction of zero."""
    return str(int(value) if value == int(value) else value)


BOUNDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "over"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "under"),
    ("minLength", "length at least"),
    ("maxLength", "length at most"),
    ("minItems", "items: at least"),
    ("maxItems", "items: at most"),
)


def describe_type(schema: Json) -> str:
    """A type with links to named schemas."""
    if ref := schema.get("$ref"):
        name = ref.rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(describe_type(each) for each in choices)
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {describe_type(schema.get('items', {}))}"
    extra = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(extra, Mapping) and extra:
        return f"object of {describe_type(extra)}"
    return str(schema.get("type", "any"))
