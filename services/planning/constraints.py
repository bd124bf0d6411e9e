"""Check of a turn's constraint before anything is begun: by llguidance, as workers compile it."""

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from kvrecall.domain.constraints import FREE, Constraint, ToolChoice, get_tool, to_grammar_schema
from kvrecall.domain.errors import InvalidRequest


async def check_constraint(
    constraint: Constraint, tools: Sequence[str], can_call: bool = True
) -> None:
    """Check that a worker can do what a turn asks for. Raises InvalidRequest with the member.

    tools: JSON texts of the session's tools; can_call: the form of the model's calls is known.
    Schemas are compiled on another thread, and the outcomes kept, as agents send the same ones with
    every request.
    """
    if constraint == FREE and not tools:
        return
    _check_choice(constraint, [get_tool(tool)[0] for tool in tools], can_call)
    if constraint.schema:
        schema = json.loads(constraint.schema)
        await _check_schema(schema, constraint.strict, "response_format")
    if constraint.tool_choice is ToolChoice.NONE or not can_call:
        return
    for index, tool in enumerate(tools):
        name, schema, strict = get_tool(tool)
        if strict and (not constraint.tools or name in constraint.tools):
            await _check_schema(schema, strict, f"tools[{index}].function.parameters")


def _check_choice(constraint: Constraint, names: Sequence[str], can_call: bool) -> None:
    missing = set(constraint.tools) - set(names)
    if missing:
        raise InvalidRequest("tool_choice", f"there is no tool {min(missing)!r}")
    if constraint.tool_choice is not ToolChoice.REQUIRED:
        return
    if not names:
        raise InvalidRequest("tool_choice", "a call is required, but there are no tools")
    if not can_call:
        message = "a call is required, but the form of this model's calls is not known"
        raise InvalidRequest("tool_choice", message, openai_code="unsupported_parameter")


async def _check_schema(schema: dict[str, Any], strict: bool, field: str) -> None:
    text = json.dumps(to_grammar_schema(schema, strict))
    if problem := await asyncio.to_thread(_find_problem, text):
        raise InvalidRequest(field, f"the schema cannot be followed: {problem}")


@lru_cache(maxsize=256)
def _find_problem(schema: str) -> str:
    """Return why a schema cannot be compiled, with the keyword that is at fault; empty if it can."""
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return problem.strip()[:300]
