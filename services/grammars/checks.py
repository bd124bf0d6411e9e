"""Checks of grammars in child processes, on behalf of tenants."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from llguidance import LLMatcher

from kvrecall.domain.errors import Overloaded
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
