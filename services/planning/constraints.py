"""Check of a turn's constraint before anything is begun: by llguidance, as workers compile it."""

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from kvrecall.domain.answer.constraints import (
    FREE,
    TAGGED_CALLS,
    UNGUIDED_CALLS,
    Constraint,
    ToolChoice,
    find_text_grammar,
    find_untagged,
    get_tool,
    to_grammar_schema,
)
from kvrecall.domain.answer.text_grammars import check_grammar, quote_grammar
from kvrecall.domain.errors import InvalidRequest


async def check_constraint(constraint: Constraint, tools: Sequence[str], call_format: str) -> None:
    """Check that a worker can do what a turn asks for. Raises InvalidRequest with the member.

    tools: JSON texts of the session's tools; call_format: the form of the model's calls (empty: it
    is not known, so there are none).
    Schemas are compiled on another thread, and the outcomes kept, as agents send the same ones with
    every request.
    """
    if constraint == FREE and not tools:
        return
    _check_choice(constraint, [get_tool(tool)[0] for tool in tools], call_format)
    if constraint.schema:
        schema = json.loads(constraint.schema)
        await _check_schema(schema, constraint.strict, "response_format")
    if constraint.grammar:
        problem = await asyncio.to_thread(_find_grammar_problem, constraint.grammar)
        if problem:
            raise InvalidRequest("grammar", f"the grammar cannot be followed: {problem}")
    if constraint.tool_choice is ToolChoice.NONE or not call_format:
        return
    for index, tool in enumerate(tools):
        name, schema, strict = get_tool(tool)
        if constraint.tools and name not in constraint.tools:
            continue
        field = f"tools[{index}].function"
        if strict:
            await _check_strict(schema, field, call_format)
        if (text := find_text_grammar(schema)) is not None:
            await _check_text_grammar(text[1], f"{field}.parameters", call_format)


async def _check_strict(schema: dict[str, Any], field: str, call_format: str) -> None:
    """Raise InvalidRequest unless every call of a tool can be held to its schema."""
    if call_format == UNGUIDED_CALLS:
        message = "calls of this model cannot be held to a schema; leave strict out"
        raise InvalidRequest(f"{field}.strict", message, openai_code="unsupported_parameter")
    await _check_schema(schema, True, f"{field}.parameters")
    if call_format == TAGGED_CALLS and (keyword := find_untagged(schema)):
        message = f"calls of this model cannot be held to {keyword!r}; leave it or strict out"
        raise InvalidRequest(f"{field}.parameters", message)


async def _check_text_grammar(grammar: str, field: str, call_format: str) -> None:
    """Raise InvalidRequest unless a text can be held to a grammar, where calls are held to any."""
    try:
        check_grammar(grammar)
        if call_format not in (TAGGED_CALLS, UNGUIDED_CALLS):
            grammar = quote_grammar(grammar)
        problem = await asyncio.to_thread(_find_grammar_problem, grammar)
    except ValueError as error:
        problem = str(error)
    if problem:
        raise InvalidRequest(field, f"the grammar cannot be followed: {problem}")


def _check_choice(constraint: Constraint, names: Sequence[str], call_format: str) -> None:
    missing = set(constraint.tools) - set(names)
    if missing:
        raise InvalidRequest("tool_choice", f"there is no tool {min(missing)!r}")
    unguided = call_format == UNGUIDED_CALLS and constraint.tool_choice is not ToolChoice.NONE
    if unguided and names and constraint.single_call:
        message = "calls of this model cannot be held to one; leave parallel_tool_calls out"
        raise InvalidRequest("parallel_tool_calls", message, openai_code="unsupported_parameter")
    if unguided and constraint.tools:
        message = "calls of this model cannot be held to some of the tools; send only these"
        raise InvalidRequest("tool_choice", message, openai_code="unsupported_parameter")
    if constraint.tool_choice is not ToolChoice.REQUIRED:
        return
    if not names:
        raise InvalidRequest("tool_choice", "a call is required, but there are no tools")
    if not call_format or unguided:
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


@lru_cache(maxsize=256)
def _find_grammar_problem(grammar: str) -> str:
    """Return why a grammar in Lark's syntax cannot be compiled; empty if it can."""
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    return problem.strip()[:300]
