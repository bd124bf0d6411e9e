"""The tokens of an answer as OpenAI's APIs count them."""

from dataclasses import dataclass
from typing import Any

from kvrecall.domain.reports import TurnOutcome


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of the whole conversation before the answer, those not computed for it, and the answer's.

    The last token of an answer has no row yet. Tokens whose rows are evicted count as cached: they
    are stored and can come back.
    """

    prompt: int
    cached: int
    output: int

    @property
    def written(self) -> int:
        """Tokens of the conversation that were computed for this answer."""
        return self.prompt - self.cached

    @property
    def total(self) -> int:
        """All tokens of the conversation."""
        return self.prompt + self.output


def count_tokens(outcome: TurnOutcome, appended: int) -> TokenCounts:
    """Count the tokens of an answer; `appended` were computed for it in turns before its own."""
    prompt = max(outcome.prompt_tokens, outcome.memory.length + 1 - outcome.output_tokens)
    computed = outcome.prefilled_tokens + appended
    return TokenCounts(prompt, max(0, prompt - computed), outcome.output_tokens)


def build_counts(prompt: int, output: int) -> dict[str, int]:
    """Build the counts of a usage by the names of completions."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def build_receipt(outcome: TurnOutcome) -> dict[str, Any]:
    """Build the member `kvrecall` of a usage: what the session's memory holds, for people."""
    memory = outcome.memory
    return {
        "active_rows": memory.active_rows,
        "evicted_rows": memory.evicted_rows,
        "promoted_rows": memory.promoted_rows,
        "dropped_tokens": outcome.dropped_tokens,
        "repaired_seconds": round(sum(repair.seconds for repair in outcome.repairs), 6),
    }
