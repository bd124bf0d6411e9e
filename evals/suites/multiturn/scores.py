"""Scores of a turn: of the generated reply, by the kind of dialogue, and of the choice of a value."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from evals.errors import BadExample
from evals.languages.base import Language
from evals.spans import decode_with_offsets, overlapping
from evals.suites.multiturn.dialogue import Turn
from evals.summary import mean
from evals.text_scores import lines_f1, rouge_l, word_f1
from workers.engine.session import Distribution
from workers.model.tokenizer import ChatTokenizer

EXACT = "exact"
CHOICE = "choice"
KL = "kl"
TOP1 = "top1"
# Share of the rows that the queries of sparse blocks attended to.
DENSITY = "density"


def score_reply(kind: str, turn: Turn, reply: str, language: Language) -> dict[str, float]:
    """Scores of a generated reply, 0 to 1, by measure: those of the kind of dialogue."""
    return _SCORES.get(kind, _exact)(turn, reply, language)


def _exact(turn: Turn, reply: str, language: Language) -> dict[str, float]:
    """1 if the reply gives every answer. Other words, such as the question's, are no answer."""
    return {EXACT: float(all(language.is_answer(reply, answer) for answer in turn.answers))}


def _lines(turn: Turn, reply: str, language: Language) -> dict[str, float]:
    expected = "\n".join(turn.answers)
    return {
        "lines_f1": lines_f1(reply, turn.answers, language.is_answer),
        "rouge_l": rouge_l(reply, expected),
    }


def _f1(turn: Turn, reply: str, language: Language) -> dict[str, float]:
    """F1 against the answer that fits best: a question of these sets has several wordings."""
    return {"f1": max(word_f1(reply, answer) for answer in turn.answers)}


_SCORES: Mapping[str, Callable[[Turn, str, Language], dict[str, float]]] = MappingProxyType(
    {"list": _lines, "locomo": _f1, "longbench": _f1}
)


def choose(
    kept: Distribution, turn: Turn, values: Sequence[str], tokenizer: ChatTokenizer
) -> list[str]:
    """The candidate that each answer's first token is likeliest to be, of the turn's choices.

    `kept` is the distribution on the recorded reply `turn.give(values)`. Raises BadExample where
    two candidates begin with the same token.
    """
    first = {tokenizer.encode(f" {choice}")[0]: choice for choice in turn.choices}
    if len(first) < len(turn.choices):
        raise BadExample(f"the candidates {turn.choices} do not differ in their first token")
    decoded, starts = decode_with_offsets(tokenizer, kept.token_ids)
    at = decoded.find(turn.give(values))
    chosen = []
    for number in range(len(values)):
        head = turn.give(values[: number + 1]).removesuffix(f" {values[number]}.")
        (place, *_) = overlapping(starts, at + len(head), " ")
        chosen.append(_likeliest(kept.log_probs[place], first))
    return chosen


def _likeliest(log_probs: Tensor, candidates: Mapping[int, str]) -> str:
    """The candidate of the highest log-probability (nats, float32 `[vocabulary]`)."""
    return candidates[max(candidates, key=lambda token: float(log_probs[token]))]


def score_choice(turn: Turn, chosen: Sequence[str]) -> float:
    """Share of the answers that were chosen."""
    return mean(
        float(choice == answer) for choice, answer in zip(chosen, turn.answers, strict=True)
    )
