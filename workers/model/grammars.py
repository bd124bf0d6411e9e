"""Compiled grammars of a model's vocabulary, kept by the constraints that they are of."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from kvrecall.domain.answer.constraints import Constraint, get_tool, to_grammar_schema
from workers.errors import BadSettings
from workers.model.answer_grammar import build_grammars
from workers.model.tokenizer import ChatTokenizer

# Agents send the same tools with every request; each entry is some kilobytes.
_KEPT = 256


@dataclass(frozen=True)
class CompiledGrammars:
    """Grammars of one constraint, to be copied for each answer; None where the answer is free.

    - `whole`: from the answer's first token, or the first one behind its reasoning.
    - `behind_mark`: from the first mark of a call to the end.
    """

    whole: LLMatcher | None = None
    behind_mark: LLMatcher | None = None


class Grammars:
    """Compiles the constraints of answers. Methods may be called from any thread.

    A compilation may take a second. It holds no lock, so that no answer, and no other compilation,
    waits for it; what two threads compile at the same time they compile twice.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens = {text: id for id, text in self._token_texts().items()}
        self._build = lru_cache(maxsize=_KEPT)(self._build_new)

    @cached_property
    def vocabulary(self) -> LLTokenizer:
        """The vocabulary as llguidance walks it; built at the first use, in up to a second."""
        return from_tokenizer(self._tokenizer.inner, eos_token=list(self._tokenizer.eos_token_ids))

    def build(self, constraint: Constraint, tools: Sequence[str]) -> CompiledGrammars:
        """Compile a constraint's grammars, unless they are kept.

        A tool that is not strict and whose schema cannot be compiled takes any object. Raises
        BadSettings for what can't be compiled otherwise, with llguidance's message, which names the
        keyword.
        """
        return self._build(constraint, tuple(tools))

    def _build_new(self, constraint: Constraint, tools: tuple[str, ...]) -> CompiledGrammars:
        assert self.vocabulary.vocab_size, "a model has tokens"
        usable = [self._relax(tool) for tool in tools]
        grammars = build_grammars(constraint, usable, self._tokenizer.format, self._tokens)
        return CompiledGrammars(self._compile(grammars.whole), self._compile(grammars.behind_mark))

    def _compile(self, grammar: str) -> LLMatcher | None:
        if not grammar:
            return None
        # A message with the parser's state would show the client's schema in logs.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise BadSettings(f"the answer cannot be constrained: {matcher.get_error()[:500]}")
        return matcher

    def _relax(self, tool: str) -> str:
        name, schema, strict = get_tool(tool)
        if strict or not LLMatcher.validate_grammar(
            LLMatcher.grammar_from_json_schema(json.dumps(to_grammar_schema(schema, strict)))
        ):
            return tool
        return json.dumps({"function": {"name": name}})

    def _token_texts(self) -> dict[int, str]:
        """Texts of the tokens that marks may be written as."""
        form = self._tokenizer.format
        added = self._tokenizer.inner.get_added_vocab()
        pieces = (*form.grammar.opening, *form.grammar.closing) if form.grammar else ()
        inside = (token for token in added if any(token in piece for piece in pieces))
        return {added[text]: text for text in (*form.marks, *inside) if text in added}
