"""Compiles grammars of clients in child processes, in turns of their tenants, and keeps outcomes."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from queue import SimpleQueue
from threading import Lock

from kvrecall.sandbox.process import SandboxProcess, Vocabulary
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall.sandbox.tenant_queue import QueueFull
from kvrecall.sandbox.tenant_threads import TenantThreads
from kvrecall.sandbox.verdict import SandboxBusy, Verdict

# Agents send the same grammars with every request; an outcome is a digest and a line of text.
_KEPT = 4096

Charge = Callable[[str, float], None]


class GrammarSandbox:
    """Compiles grammars in child processes with limits, and says what is wrong with them.

    Compiling takes time that doubles with each part of some grammars of a few hundred bytes, and
    cannot be cancelled: so it happens in processes that can be killed. Outcomes are kept, of grammars
    that are too complex as well. Methods may be called from any thread.
    """

    def __init__(
        self,
        settings: SandboxSettings,
        *,
        vocabulary: Vocabulary | None = None,
        charge: Charge = lambda tenant, seconds: None,
    ) -> None:
        """Start no process yet.

        vocabulary: for grammars that name tokens; charge: is told a tenant and the CPU seconds of
        each compilation, on a thread of the sandbox, in the context of the request that submitted it.
        """
        self._settings = settings
        self._charge = charge
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._lock = Lock()
        self._threads = TenantThreads(settings.processes, settings.max_waiting, "grammars")
        self._processes = [SandboxProcess(settings, vocabulary) for _ in range(settings.processes)]
        self._idle: SimpleQueue[SandboxProcess] = SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    @property
    def cpu_seconds(self) -> int:
        """CPU seconds that a grammar may take."""
        return self._settings.cpu_seconds

    def submit(self, grammar: str, tenant: str = "") -> Future[Verdict]:
        """Let a grammar in llguidance's form be compiled.

        Raises SandboxBusy, as the future may, where as many of the tenant wait as may.
        """
        most = self._settings.grammar_bytes
        encoded = grammar.encode(errors="surrogatepass")
        if len(encoded) > most:
            return _know(Verdict(f"it is too large: it has over {most} bytes", exhausted=True))
        digest = blake2b(encoded, digest_size=32).digest()
        if (known := self._find(digest)) is not None:
            return _know(known)
        try:
            work = partial(copy_context().run, self._compile, tenant, digest, grammar)
            return self._threads.submit(tenant, work)
        except QueueFull:
            most = self._settings.max_waiting
            raise SandboxBusy(f"{most} grammars wait to be compiled, which is the limit") from None

    def compile(self, grammar: str, tenant: str = "") -> Verdict:
        """Let a grammar be compiled, and wait for it. Raises SandboxBusy."""
        done = self.submit(grammar, tenant)
        try:
            return done.result(self._settings.waiting_seconds)
        except TimeoutError:
            self.give_up(done)
            return done.result()

    def give_up(self, done: Future[Verdict]) -> None:
        """Take back what has waited too long. Raises SandboxBusy unless it has begun meanwhile."""
        if done.cancel():
            most = self._settings.waiting_seconds
            raise SandboxBusy(f"the grammar was not compiled within {most:g} seconds")

    def close(self) -> None:
        """End the processes; grammars that wait are not compiled."""
        for process in self._processes:
            process.kill()
        self._threads.close()
        for process in self._processes:
            process.close()

    def _compile(self, tenant: str, digest: bytes, grammar: str) -> Verdict:
        if (known := self._find(digest)) is not None:  # the same one may have been before it
            return known
        process = self._idle.get()
        try:
            verdict = process.compile(grammar)
        except SandboxBusy as error:
            self._charge(tenant, error.cpu_seconds)
            raise
        finally:
            self._idle.put(process)
        self._charge(tenant, verdict.cpu_seconds)
        self._keep(digest, replace(verdict, cpu_seconds=0.0))
        return verdict

    def _find(self, digest: bytes) -> Verdict | None:
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def _keep(self, digest: bytes, verdict: Verdict) -> None:
        with self._lock:
            self._kept[digest] = verdict
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


def _know(verdict: Verdict) -> Future[Verdict]:
    done: Future[Verdict] = Future()
    done.set_result(verdict)
    return done
