"""A constraint at work on one answer: which tokens may come next."""

import llguidance.numpy as bitmasks
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from kvrecall.domain.answer.constraints import Constraint, ToolChoice
from workers.errors import BadSettings
from workers.model.grammars import CompiledGrammars, Grammars
from workers.model.text_stream import TextStream
from workers.model.tokenizer import ChatTokenizer


class Guide:
    """The tokens that an answer may go on with, as its constraint and what was generated say.

    It depends on the constraint and the tokens alone. A grammar of the whole answer begins behind
    the reasoning, if the answer reasons, unless it is one of that, too; one of calls begins at the
    first mark of a call. From there to the answer's end nothing else can be generated. What follows
    a mark in the mark's own token, and cannot be the beginning of a call, leaves the answer free: it
    stays text.
    """

    def __init__(
        self,
        grammars: Grammars,
        wanted: CompiledGrammars,
        stream: TextStream,
        *,
        banned: int | None = None,
        opens_reasoning: int | None = None,
        whole_reasoning: bool = False,
    ) -> None:
        """Guide the answer of `stream`.

        banned: a token that never comes; opens_reasoning: the one that begins a reasoning;
        whole_reasoning: the grammar of the whole answer is one of its reasoning, too.
        """
        self._grammars = grammars
        self._wanted = wanted
        self._stream = stream
        self._banned = banned
        self._opens_reasoning = opens_reasoning
        self._whole_reasoning = whole_reasoning
        self._matcher: LLMatcher | None = None
        self._failure = ""
        if wanted.whole is not None and stream.reasoning is not True:
            self._matcher = wanted.whole.deep_copy()

    @property
    def active(self) -> bool:
        """True while some token may not come next."""
        return self._matcher is not None or self._banned is not None

    def fill(self, allowed: NDArray[np.int32]) -> None:
        """Fill a row of bits, one per token of the model, in words of 32: 1 for what may come.

        Where the grammar fails, all may come: the failure is this answer's, not the batch's.
        """
        if self._matcher is None:
            allowed.fill(-1)
        else:
            allowed.fill(0)
            words = (self._grammars.vocabulary.vocab_size + 31) // 32
            try:
                bitmasks.fill_next_token_bitmask(self._matcher, allowed[None, :words])
            except (ValueError, RuntimeError) as error:
                self._failure = str(error)
                allowed.fill(-1)
            if self._opens_reasoning is not None and self._stream.reasoning is None:
                _set(allowed, self._opens_reasoning, True)
        if self._banned is not None:
            _set(allowed, self._banned, False)

    def accept(self, token: int) -> None:
        """Go on by a token that the stream has. Raises BadSettings where the grammar fails."""
        self.require_sound()
        if self._matcher is not None:
            if self._whole_reasoning or self._stream.reasoning is False:
                self._consume(token)
            else:
                self._matcher = None  # the answer reasons first
        elif (whole := self._wanted.whole) is not None:
            if self._stream.reasoning is False:
                begun = self._start(whole, self._stream.body)
                self._matcher = begun or whole.deep_copy()
        elif self._wanted.behind_mark is not None and self._stream.call_at is not None:
            self._matcher = self._start(self._wanted.behind_mark, self._stream.call_at)
            self._wanted = CompiledGrammars()

    def require_sound(self) -> None:
        """Raise BadSettings if the grammar has failed, as one does that is too complex."""
        if self._matcher is not None and not self._failure:
            self._failure = self._matcher.get_error()
        if self._failure:
            raise BadSettings(f"the grammar of the answer failed: {self._failure[:200]}")

    def _consume(self, token: int) -> None:
        assert self._matcher is not None
        self._matcher.consume_token(token)
        self.require_sound()

    def _start(self, grammar: LLMatcher, at: int) -> LLMatcher | None:
        """Start a grammar with the text from `at` on; None if it cannot begin so."""
        matcher = grammar.deep_copy()
        tokens = self._grammars.vocabulary.tokenize_str(self._stream.raw[at:])
        return matcher if matcher.try_consume_tokens(tokens) == len(tokens) else None


def build_guide(
    grammars: Grammars,
    wanted: CompiledGrammars,
    constraint: Constraint,
    tokenizer: ChatTokenizer,
    stream: TextStream,
) -> Guide | None:
    """Build the guide of an answer; None if it is free."""
    ids = {text: id for id, text in tokenizer.mark_texts.items()}
    form = tokenizer.format
    banned = ids.get(form.mark) if constraint.tool_choice is ToolChoice.NONE else None
    if wanted == CompiledGrammars() and banned is None:
        return None
    opening = form.reasoning[0] if form.reasoning else ""
    opens = next((id for mark, id in ids.items() if opening.startswith(mark)), None)
    several = form.channels is not None and wanted.whole is not None
    return Guide(
        grammars,
        wanted,
        stream,
        banned=banned,
        opens_reasoning=opens,
        whole_reasoning=several,
    )


def _set(allowed: NDArray[np.int32], token: int, value: bool) -> None:
    words = allowed.view(np.uint32)
    bit = np.uint32(1 << (token % 32))
    words[token // 32] = words[token // 32] | bit if value else words[token // 32] & ~bit
