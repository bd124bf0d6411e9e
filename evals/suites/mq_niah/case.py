"""One case of MQ-NIAH: an example and a partition of its needles, compressed after the first turn (RepairKV 3.2).

The reference model answers one question at a time, so the paper's prompt with all of a turn's questions becomes as
many exchanges: the first turn's are said one after the other and stay, the second turn's are each asked from the same
cache. What a repair sees of the second turn is one message with all its questions.
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
from evals.compressed import Compressed
from evals.conditions import Before, Held, before
from evals.configs import rows_of
from evals.harness import Message
from evals.replay_session import Replayed, replaying
from evals.spans import spans_of
from evals.suites.mq_niah.examples import (
    Example,
    Needle,
    example,
    other_question,
    question_of,
    turns_of,
)
from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.settings import CodecName
from workers.primitives.observation import Observed

BLOCK_TOKENS = 256
_ROOM_FOR_AN_EXCHANGE = 80


@dataclass(frozen=True)
class Protocol:
    """What an example is made of and how it is compressed. `base`: a share of the context (1/8), or rows.

    `policy`: the method of the first stage, by its name in `workers.methods`. `codec`: of stored rows.
    """

    model: str
    needles: int
    base: str
    tokens: int = 2000
    distractors: int = 8
    policy: str = "snapkv"
    codec: CodecName = RAW


@dataclass
class Case:
    """Between two turns that ask for `first` and for `second`. `spans`: where the needles stand, by their names."""

    cache: Compressed
    example: Example
    first: tuple[Needle, ...]
    second: tuple[Needle, ...]
    donor: Message
    spans: dict[str, tuple[int, ...]]

    def before(self) -> Before:
        """Before the second turn, its questions all in one message."""
        people = "".join(needle.name for needle in self.second)
        return before(
            self.cache,
            question_of(self.second),
            question_of(self.first),
            self.donor,
            f"random:{people}",
        )

    def told_of(self, ready: Before, held: Held) -> dict[str, Any]:
        """What a condition comes to: its rows, its answers, and how much of what is asked for it holds and brought."""
        tokens = self.cache.held_of_context(held.state)
        brought = tokens[~torch.isin(tokens, ready.base)]
        right = self.share_right(held.state, self.second)
        return {
            "context": self.cache.context,
            "budget": held.budget,
            "active_rows": self.cache.rows_of(held.state, held.budget),
            "right": right,
            "exact": float(right == 1.0),
            "held": self.overlap(tokens, self.second),
            "overlap": self.overlap(brought, self.second),
        }

    def share_right(self, state: wire.SessionState, needles: Sequence[Needle]) -> float:
        """The share of needles that are answered right, each asked from this state."""
        replies = [
            self.cache.replayed.ask(
                state, [{"role": "user", "content": needle.question}], harness.MOST_REPLY_TOKENS
            )
            for needle in needles
        ]
        right = sum(
            needle.is_answered_by(reply) for needle, reply in zip(needles, replies, strict=True)
        )
        return right / len(needles)

    def overlap(self, tokens: Tensor, needles: Sequence[Needle]) -> float:
        """Which share of the needles' keys and values some tokens hold."""
        wanted = torch.tensor([at for needle in needles for at in self.spans[needle.name]])
        return float(torch.isin(wanted, tokens).float().mean())


@contextmanager
def begun(protocol: Protocol, seed: int, partition: str) -> Iterator[Case]:
    """Say the context, answer the first turn from the full cache, score. Raises BadExample, BadBudget."""
    tokenizer = harness.loaded(protocol.model).tokenizer
    length_of = partial(harness.tokens_of, tokenizer)
    made = example(seed, protocol.needles, protocol.distractors, protocol.tokens, length_of)
    asked_first, asked_second = turns_of(partition)
    rows = length_of(made.context) + _ROOM_FOR_AN_EXCHANGE * (5 * protocol.needles + 2)
    with replaying(
        protocol.model,
        protocol.policy,
        seed,
        rows=rows,
        block_tokens=BLOCK_TOKENS,
        codec=protocol.codec,
    ) as replayed:
        said = replayed.say(made.context)
        context = replayed.state.length
        observed = answered(replayed, made.asked(asked_first))
        yield Case(
            cache=Compressed(
                replayed=replayed,
                context=context,
                tail=context,
                base_rows=rows_of(protocol.base, context),
                scores=replayed.first_stage(observed, context),
            ),
            example=made,
            first=made.asked(asked_first),
            second=made.asked(asked_second),
            donor=other_question(seed, made, asked_second, protocol.distractors, protocol.tokens),
            spans=spans_of(tokenizer, said, {needle.name: needle.span for needle in made.needles}),
        )


def answered(replayed: Replayed, needles: Sequence[Needle]) -> Observed:
    """Ask for needles from the full cache, one after the other; returns the queries of all replies together."""
    return Observed.concatenate(
        [replayed.reply(needle.question, harness.MOST_REPLY_TOKENS).observed for needle in needles]
    )
