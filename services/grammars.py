"""Checks of grammars and of answers' constraints, before a turn is begun."""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from kvrecall.domain.answer.constraints import (
    FREE,
    RAW_CALLS,
    TAGGED_CALLS,
    UNGUIDED_CALLS,
    Constraint,
    ToolChoice,
    find_text_grammar,
    get_tool,
    to_grammar_schema,
)
from kvrecall.domain.answer.held_schemas import find_unheld
from kvrecall.domain.answer.text_grammars import check_grammar, quote_grammar
from kvrecall.domain.errors import InvalidRequest, Overloaded
from kvrecall.domain.events import GrammarCompiled
from kvrecall.sandbox.sandbox import GrammarSandbox
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall.sandbox.verdict import SandboxBusy, Verdict

_RETRY_SECONDS = 1.0


class GrammarChecks:
    """What is wrong with a grammar, found without harm: one sandbox for all requests of a gateway."""

    def __init__(
        self, settings: SandboxSettings, publish: Callable[[GrammarCompiled], None]
    ) -> None:
        self._settings = settings
        self._publish = publish
        self._sandbox = GrammarSandbox(settings, charge=self._charge)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def cpu_seconds(self) -> int:
        """CPU seconds that a grammar may take."""
        return self._sandbox.cpu_seconds

    async def compile_schema(self, schema: str, tenant: str) -> Verdict:
        """Compile a schema's JSON text. Raises Overloaded."""
        return await self._compile(LLMatcher.grammar_from_json_schema(schema), tenant)

    async def compile_lark(self, grammar: str, tenant: str) -> Verdict:
        """Compile a grammar in Lark's syntax. Raises Overloaded."""
        return await self._compile(LLMatcher.grammar_from_lark(grammar), tenant)

    def close(self) -> None:
        """End the processes."""
        self._sandbox.close()

    async def _compile(self, grammar: str, tenant: str) -> Verdict:
        self._loop = asyncio.get_running_loop()
        try:
            return await self._wait(self._sandbox.submit(grammar, tenant))
        except SandboxBusy as error:
            raise Overloaded(f"{error}; try again later", _RETRY_SECONDS) from error

    async def _wait(self, compiling: Future[Verdict]) -> Verdict:
        if compiling.done():
            return compiling.result()
        waiting = asyncio.wrap_future(compiling)
        try:
            done, _ = await asyncio.wait([waiting], timeout=self._settings.waiting_seconds)
            if not done:
                self._sandbox.give_up(compiling)
            return await waiting
        finally:
            compiling.cancel()  # if its client has left

    def _charge(self, cpu_seconds: float) -> None:
        # `call_soon_threadsafe` keeps the context, and with it the sender that is charged.
        with suppress(RuntimeError):  # the loop has ended
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._publish, GrammarCompiled(cpu_seconds))


class ConstraintChecks:
    """Checks that a worker can do what a turn asks for, before a session is begun for it."""

    def __init__(self, grammars: GrammarChecks) -> None:
        self._grammars = grammars

    async def check(
        self, constraint: Constraint, tools: Sequence[str], call_format: str, tenant: str
    ) -> None:
        """Check a constraint. Raises InvalidRequest with the member, and Overloaded.

        tools: JSON texts of the session's tools; call_format: the form of the model's calls (empty:
        it is not known, so there are none); tenant: whose grammars are compiled.
        """
        if constraint == FREE and not tools:
            return
        _check_choice(constraint, [get_tool(tool)[0] for tool in tools], call_format)
        check = _GrammarCheck(self._grammars, call_format, tenant)
        if constraint.schema:
            schema = json.loads(constraint.schema)
            await check.require_schema(schema, constraint.strict, "response_format")
        if constraint.grammar:
            await check.require_lark(constraint.grammar, "grammar")
        if constraint.tool_choice is ToolChoice.NONE or not call_format:
            return
        for index, tool in enumerate(tools):
            name, schema, strict = get_tool(tool)
            if constraint.tools and name not in constraint.tools:
                continue
            field = f"tools[{index}].function"
            if strict:
                await check.require_strict(schema, field)
            if (text := find_text_grammar(schema)) is not None:
                await check.require_text(text[1], f"{field}.parameters")


@dataclass
class _GrammarCheck:
    """Checks of one turn's grammars, which together take the CPU seconds of one: `spent` so far."""

    grammars: GrammarChecks
    call_format: str
    tenant: str
    spent: float = 0.0

    async def require_schema(self, schema: dict[str, Any], strict: bool, field: str) -> None:
        """Raise InvalidRequest unless a schema can be followed."""
        text = json.dumps(to_grammar_schema(schema, strict))
        self._require(field, "schema", await self.grammars.compile_schema(text, self.tenant))

    async def require_lark(self, grammar: str, field: str) -> None:
        """Raise InvalidRequest unless a grammar can be followed."""
        self._require(field, "grammar", await self.grammars.compile_lark(grammar, self.tenant))

    async def require_strict(self, schema: dict[str, Any], field: str) -> None:
        """Raise InvalidRequest unless every call of a tool can be held to its schema."""
        if self.call_format in UNGUIDED_CALLS:
            message = "calls of this model cannot be held to a schema; leave strict out"
            raise InvalidRequest(f"{field}.strict", message, openai_code="unsupported_parameter")
        await self.require_schema(schema, True, f"{field}.parameters")
        if keyword := find_unheld(schema, self.call_format):
            message = f"calls of this model cannot be held to {keyword!r}; leave it or strict out"
            raise InvalidRequest(f"{field}.parameters", message)

    async def require_text(self, grammar: str, field: str) -> None:
        """Raise InvalidRequest unless a text can be held to a grammar, where calls are held to any."""
        try:
            check_grammar(grammar)
            if self.call_format not in TAGGED_CALLS | RAW_CALLS | UNGUIDED_CALLS:
                grammar = quote_grammar(grammar)
        except ValueError as error:
            raise InvalidRequest(field, f"the grammar cannot be followed: {error}") from error
        await self.require_lark(grammar, field)

    def _require(self, field: str, what: str, verdict: Verdict) -> None:
        if verdict.problem:
            raise InvalidRequest(field, f"the {what} cannot be followed: {verdict.problem}")
        self.spent += verdict.cpu_seconds
        if self.spent > self.grammars.cpu_seconds:
            raise InvalidRequest(
                field, "it and the grammars before it are too complex together; ask for fewer"
            )


def _check_choice(constraint: Constraint, names: Sequence[str], call_format: str) -> None:
    missing = set(constraint.tools) - set(names)
    if missing:
        raise InvalidRequest("tool_choice", f"there is no tool {min(missing)!r}")
    unguided = call_format in UNGUIDED_CALLS and constraint.tool_choice is not ToolChoice.NONE
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
