"""Traces of Mooncake: turns with the ids of their prompts' blocks, and more sessions made of them."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
FILE = "conversation_trace.jsonl"
# The trace counts time in steps of three seconds: within one, turns come at random times.
STEP_SECONDS = 3.0
# The most families of a copy.
FAMILIES = 1000


@dataclass(frozen=True)
class Turn:
    """A turn of a session.

    Attributes:
        at: Seconds from the begin of the trace.
        session: Number of its session.
        first: True for the first turn of the session.
        blocks: Ids of its prompt's blocks. Equal ids have the same tokens before them too.
        written: Ids of the whole blocks that a worker has of it at its end, its answer included as far as
            the session's next turn names its blocks.
        input_tokens: Tokens of the prompt.
        output_tokens: Tokens of the answer.
    """

    at: float
    session: int
    first: bool
    blocks: tuple[int, ...]
    written: tuple[int, ...]
    input_tokens: int
    output_tokens: int

    def sped_up(self, pace: float) -> "Turn":
        """The same turn where time runs so many times as fast."""
        return replace(self, at=self.at / pace)


def read_trace(folder: Path) -> list[Turn]:
    """Read the turns of a trace in their order. Raises OSError if the folder has none."""
    lines = (folder / FILE).read_text("utf-8").splitlines()
    return follow([json.loads(line) for line in lines])


def follow(requests: Sequence[dict[str, Any]]) -> list[Turn]:
    """Find the session of each request: one whose last prompt it begins with, or a new one."""
    ends: dict[int, int] = {}
    last: dict[int, int] = {}
    turns: list[Turn] = []
    for request in requests:
        blocks = tuple(request["hash_ids"])
        before = next((ends.pop(each) for each in reversed(blocks[1:]) if each in ends), None)
        session = len(last) if before is None else before
        turns.append(_build(request, session, before is None))
        if before is not None:
            turns[last[session]] = _add_answer(turns[last[session]], blocks)
        last[session] = len(turns) - 1
        if len(blocks) > 2:
            ends[blocks[-2]] = session  # the last one is not whole: the next turn has it no more
    return turns


def multiply(turns: Sequence[Turn], sessions: int, rng: random.Random) -> list[Turn]:
    """Replicate a trace until it has so many sessions, each copy with ids and a delay of its own.

    Copies are tenants whose prompts have nothing in common. A delay is up to a minute; of the last copy a
    random part of the sessions is taken.
    """
    own = 1 + max(turn.session for turn in turns)
    shift = 1 + max(max(turn.blocks) for turn in turns)
    made: list[Turn] = []
    for copy, begin in enumerate(range(0, sessions, own)):
        kept = set(rng.sample(range(own), min(own, sessions - begin)))
        delay = rng.uniform(0.0, 60.0)
        chosen = (turn for turn in turns if turn.session in kept)
        made.extend(_shift(chosen, begin, copy * shift, delay, rng))
    return sorted(made, key=lambda turn: turn.at)


def lengthen(turns: Sequence[Turn], blocks: int, families: int) -> list[Turn]:
    """Put so many blocks before every prompt, as tools and system messages are, in so many families a copy."""
    return (
        [_lengthen(turn, blocks, turn.session % families) for turn in turns] if blocks else [*turns]
    )


def _lengthen(turn: Turn, blocks: int, family: int) -> Turn:
    # The ids of a trace are not negative. Its sessions begin with one block, of which each copy has its own.
    begin = -blocks * (1 + family + turn.blocks[0] * FAMILIES)
    beginning = tuple(range(begin, begin + blocks))
    return replace(
        turn,
        blocks=beginning + turn.blocks,
        written=beginning + turn.written,
        input_tokens=turn.input_tokens + blocks * BLOCK_TOKENS,
    )


def split(turns: Sequence[Turn]) -> float:
    """Time that divides a trace into a half for tuning and a held-out half."""
    return turns[len(turns) // 2].at


def _shift(
    turns: Iterator[Turn], sessions: int, ids: int, delay: float, rng: random.Random
) -> Iterator[Turn]:
    for turn in turns:
        yield replace(
            turn,
            at=turn.at + delay + rng.uniform(0.0, STEP_SECONDS),
            session=turn.session + sessions,
            blocks=tuple(each + ids for each in turn.blocks),
            written=tuple(each + ids for each in turn.written),
        )


def _build(request: dict[str, Any], session: int, first: bool) -> Turn:
    blocks = tuple(request["hash_ids"])
    tokens = request["input_length"]
    return Turn(
        at=request["timestamp"] / 1000,
        session=session,
        first=first,
        blocks=blocks,
        written=blocks[: tokens // BLOCK_TOKENS],
        input_tokens=tokens,
        output_tokens=request["output_length"],
    )


def _add_answer(turn: Turn, following: Sequence[int]) -> Turn:
    """A turn that also wrote the blocks of its answer, which the session's next prompt begins with."""
    whole = (turn.input_tokens + turn.output_tokens) // BLOCK_TOKENS
    return replace(turn, written=tuple(islice(following, whole)))
