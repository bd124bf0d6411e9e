"""One case of MQ-NIAH: an example and a partition of its needles, compressed after the first turn.

RepairKV 3.2. A small model answers one question at a time, so the paper's prompt with all of
a turn's questions becomes as many exchanges: those of the first turn are appended one after the
other and stay, those of the second turn are each asked from the same cache. The repair signal of
the second turn is one message with all its questions.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evals import harness
from evals.codecs import RAW
from evals.compressed import CompressedContext
from evals.conditions import BaselineState, ConditionResult, build_baseline
from evals.configs import budget_rows
from evals.harness import Message
from evals.languages.base import Language
from evals.languages.choice import get_language
from evals.replay_session import ReplaySession, open_replay_session
from evals.spans import find_spans
from evals.suites.mq_niah.examples import (
    Example,
    Needle,
    build_donor_question,
    build_example,
    build_question,
    parse_partition,
)
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.settings import CodecName
from workers.primitives.observation import Observed

BLOCK_TOKENS = 256
# Tokens of a question with its reply, at most.
_EXCHANGE_TOKENS = 80


@dataclass(frozen=True)
class Protocol:
    """Sizes of an example and its compression.

    `base` is a share of the context (1/8), or rows. `policy` is the method of the first stage, by
    its name in `workers.methods`. `codec` is that of stored rows. `data` are files and folders with
    recordings that the small talk is taken from; none: it is generated.
    """

    model: str
    needles: int
    base: str
    tokens: int = 2000
    distractors: int = 8
    policy: str = "snapkv"
    codec: CodecName = RAW
    data: tuple[str, ...] = ()


@dataclass
class Case:
    """A compressed example between the turns that ask for the needles `first` and `second`.

    `spans` are the positions of each needle's key and value, by its name.
    """

    cache: CompressedContext
    language: Language
    example: Example
    first: tuple[Needle, ...]
    second: tuple[Needle, ...]
    donor: Message
    spans: dict[str, tuple[int, ...]]

    def build_baseline(self) -> BaselineState:
        """The base cache before the second turn, with that turn's signals."""
        people = "".join(needle.name for needle in self.second)
        return build_baseline(
            self.cache,
            build_question(self.second),
            build_question(self.first),
            self.donor,
            f"random:{people}",
        )

    def measure(self, baseline: BaselineState, result: ConditionResult) -> dict[str, Any]:
        """Record columns of a condition: rows, answers, and shares of the needles' spans.

        `held` is the share of the second turn's spans that is active, `overlap` the share that is
        active beyond the base cache.
        """
        tokens = self.cache.active_context(result.state)
        added = _list_added(tokens, baseline)
        right = self.share_right(result.state, self.second)
        return {
            "context": self.cache.context,
            "budget": result.budget,
            "active_rows": self.cache.count_rows(result.state, result.budget),
            "right": right,
            "exact": float(right == 1.0),
            "held": self.overlap(tokens, self.second),
            "overlap": self.overlap(added, self.second),
        }

    def list_added(self, baseline: BaselineState, result: ConditionResult) -> set[int]:
        """Positions of the context that are active beyond the base cache."""
        return set(_list_added(self.cache.active_context(result.state), baseline).tolist())

    def share_right(self, state: pb.SessionState, needles: Sequence[Needle]) -> float:
        """Share of needles with the right answer, each asked from this state."""
        replies = [
            self.cache.session.ask(
                state, [{"role": "user", "content": needle.question}], harness.MAX_REPLY_TOKENS
            )
            for needle in needles
        ]
        right = sum(
            self.language.is_answer(reply, needle.value)
            for needle, reply in zip(needles, replies, strict=True)
        )
        return right / len(needles)

    def overlap(self, tokens: Tensor, needles: Sequence[Needle]) -> float:
        """Share of the needles' keys and values that is among `tokens`, int64 positions."""
        positions = [position for needle in needles for position in self.spans[needle.name]]
        return float(torch.isin(torch.tensor(positions), tokens).float().mean())


@contextmanager
def open_case(protocol: Protocol, seed: int, partition: str) -> Iterator[Case]:
    """Append the context, answer the first turn from the full cache, compute first-stage scores.

    Raises BadExample, BadBudget, `workers.errors`.
    """
    tokenizer = harness.load(protocol.model).tokenizer
    count_tokens = partial(harness.count_tokens, tokenizer)
    language = get_language(protocol.model, protocol.data)
    sizes = (protocol.distractors, protocol.tokens)
    example = build_example(seed, protocol.needles, *sizes, count_tokens, language)
    first, second = parse_partition(partition)
    rows = count_tokens(example.context) + _EXCHANGE_TOKENS * (5 * protocol.needles + 2)
    with open_replay_session(
        protocol.model,
        protocol.policy,
        seed,
        rows=rows,
        block_tokens=BLOCK_TOKENS,
        codec=protocol.codec,
    ) as session:
        token_ids = session.append(example.context)
        context = session.state.length
        observed = ask_needles(session, example.get_needles(first))
        spans = {needle.name: needle.span for needle in example.needles}
        yield Case(
            cache=CompressedContext(
                session=session,
                context=context,
                turn_start=context,
                base_rows=budget_rows(protocol.base, context),
                scores=session.first_stage_scores(observed, context),
            ),
            language=language,
            example=example,
            first=example.get_needles(first),
            second=example.get_needles(second),
            donor=build_donor_question(seed, example, second, *sizes, language),
            spans=find_spans(tokenizer, token_ids, spans),
        )


def ask_needles(session: ReplaySession, needles: Sequence[Needle]) -> Observed:
    """Ask for needles from the full cache, one after the other; returns queries of all replies."""
    return Observed.concatenate(
        [session.reply(needle.question, harness.MAX_REPLY_TOKENS).observed for needle in needles]
    )


def _list_added(tokens: Tensor, baseline: BaselineState) -> Tensor:
    return tokens[~torch.isin(tokens, baseline.base)]
