"""Compiled grammars of a model's vocabulary, kept by the constraints that they are of."""

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from kvrecall.domain.answer.constraints import Constraint, get_tool, to_grammar_schema
from kvrecall.sandbox.child import build_parser_limits
from kvrecall.sandbox.sandbox import GrammarSandbox
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall.sandbox.verdict import SandboxBusy, Verdict
from workers.errors import BadSettings, Overloaded
from workers.model.answer_grammar import build_grammars
from workers.model.tokenizer import ChatTokenizer

# Agents send the same tools with every request; most entries are some kilobytes.
_KEPT = 256
_KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class CompiledGrammars:
    """Grammars of one constraint, to be copied for each answer; None where the answer is free.

    - `whole`: from the answer's first token, or the first one behind its reasoning.
    - `behind_mark`: from the first mark of a call to the end.
    - `memory_bytes`: what compiling them took at most.
    """

    whole: LLMatcher | None = None
    behind_mark: LLMatcher | None = None
    memory_bytes: int = 0


class Grammars:
    """Compiles the constraints of answers. Methods may be called from any thread.

    Each grammar is compiled in a child process first, with limits, and only one that can be is
    compiled here, with the same limits: here it could not be ended. A compilation may take a second. It
    holds no lock, so that no answer, and no other compilation, waits for it.
    """

    def __init__(self, tokenizer: ChatTokenizer, sandbox: SandboxSettings | None = None) -> None:
        self._tokenizer = tokenizer
        self._sandbox = GrammarSandbox(
            sandbox or SandboxSettings(), vocabulary=self._describe_vocabulary
        )
        self._tokens = {text: id for id, text in self._token_texts().items()}
        added = tokenizer.inner.added_tokens_decoder
        self._special = frozenset(text for text, id in self._tokens.items() if added[id].special)
        self._kept: OrderedDict[tuple[Constraint, tuple[str, ...]], CompiledGrammars] = (
            OrderedDict()
        )
        self._lock = Lock()

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The vocabulary as llguidance walks it; built at the first use, in up to a second."""
        return LLTokenizer(**self._describe_vocabulary())

    def build(
        self, constraint: Constraint, tools: Sequence[str], tenant: str = ""
    ) -> CompiledGrammars:
        """Compile a constraint's grammars, unless they are kept.

        A tool that is not strict takes any object if its schema cannot be compiled, and all such
        tools do if they cannot be compiled together. Raises BadSettings for what can't be compiled
        otherwise, with llguidance's message, which names the keyword, and Overloaded.
        """
        if (known := self.find(constraint, tools)) is not None:
            return known
        key = (constraint, tuple(tools))
        built = self._build_new(constraint, key[1], tenant)
        with self._lock:
            self._kept[key] = built
            while len(self._kept) > _KEPT or _sum_bytes(self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return built

    def find(self, constraint: Constraint, tools: Sequence[str]) -> CompiledGrammars | None:
        """Return a constraint's grammars if they are kept."""
        key = (constraint, tuple(tools))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def close(self) -> None:
        """End the processes."""
        self._sandbox.close()

    def _build_new(
        self, constraint: Constraint, tools: tuple[str, ...], tenant: str
    ) -> CompiledGrammars:
        verdict = Verdict()
        for usable in self._relax(tools, tenant):
            form = self._tokenizer.format
            grammars = build_grammars(constraint, usable, form, self._tokens, self._special)
            verdict = self._try(grammars.whole or grammars.behind_mark, tenant)
            if not verdict.problem:
                return CompiledGrammars(
                    self._compile(grammars.whole),
                    self._compile(grammars.behind_mark),
                    verdict.memory_bytes,
                )
        raise BadSettings(f"the answer cannot be constrained: {verdict.problem}")

    def _try(self, grammar: str, tenant: str) -> Verdict:
        try:
            return self._sandbox.compile(grammar, tenant) if grammar else Verdict()
        except SandboxBusy as error:
            raise Overloaded(f"{error}; try again later") from error

    def _compile(self, grammar: str) -> LLMatcher | None:
        if not grammar:
            return None
        limits = build_parser_limits()
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=limits)
        assert not matcher.is_error(), "it was compiled before, in the sandbox"
        return matcher

    def _relax(self, tools: tuple[str, ...], tenant: str) -> Iterator[Sequence[str]]:
        """Yield the tools as they are, and with ever fewer schemas of those that are not strict."""
        yield tools
        if all(get_tool(tool)[2] for tool in tools):
            return
        usable = self._relax_faulty(tools, tenant)
        if usable != tools:
            yield usable
        yield [tool if get_tool(tool)[2] else _free(tool) for tool in tools]

    def _relax_faulty(self, tools: tuple[str, ...], tenant: str) -> tuple[str, ...]:
        """Relax the tools whose schemas cannot be compiled alone, and those there is no time for."""
        spent = 0.0
        usable = []
        for tool in tools:
            _, schema, strict = get_tool(tool)
            text = json.dumps(to_grammar_schema(schema, strict))
            verdict = Verdict()
            if not strict and spent < self._sandbox.cpu_seconds:
                verdict = self._try(LLMatcher.grammar_from_json_schema(text), tenant)
                spent += verdict.cpu_seconds
            faulty = verdict.problem or spent >= self._sandbox.cpu_seconds
            usable.append(_free(tool) if faulty and not strict else tool)
        return tuple(usable)

    def _describe_vocabulary(self) -> dict[str, Any]:
        """Return the arguments of `LLTokenizer` for the model's vocabulary, in JSON's types."""
        backend = copy(self._tokenizer.inner.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return {"tokenizer": backend.to_str(), "eos_token": list(self._tokenizer.eos_token_ids)}

    def _token_texts(self) -> dict[int, str]:
        """Texts of the tokens that marks may be written as."""
        form = self._tokenizer.format
        added = self._tokenizer.inner.get_added_vocab()
        pieces = form.grammar.pieces if form.grammar else ()
        inside = (token for token in added if any(token in piece for piece in pieces))
        return {added[text]: text for text in (*form.marks, *inside) if text in added}


def _free(tool: str) -> str:
    """Return a tool that takes any object."""
    return json.dumps({"function": {"name": get_tool(tool)[0]}})


def _sum_bytes(grammars: Iterable[CompiledGrammars]) -> int:
    return sum(each.memory_bytes for each in grammars)
