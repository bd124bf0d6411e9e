"""Block prefill: appends new tokens in blocks, each followed by eviction (EpiCache section 2.2)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, pairwise

import torch
from torch import Tensor

from workers.engine.activation import LayerSource
from workers.engine.engine import Engine
from workers.engine.session import Distribution, ResidentSession, SessionConfig, WorkerSession
from workers.generation.block_attention import begin_block
from workers.generation.kept_states import keep_states
from workers.generation.splice import Splice, append_rows, count_tokens
from workers.generation.steps import Steps
from workers.model.tokenizer import Segment


@dataclass(frozen=True)
class PrefillResult:
    """Logits after the last token, float32 `[vocabulary]`, and the distribution if asked for.

    `tokens` were computed, the last `recorded` of them as an answer's are: one by one.
    """

    logits: Tensor
    distribution: Distribution | None
    tokens: int
    recorded: int


@dataclass(frozen=True)
class _Block:
    """Tokens start..stop-1 of the prefill, appended in one step.

    `decodes`: as in decoding, the step retrieves rows, and evicts only for room.
    """

    start: int
    stop: int
    decodes: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def prefill(
    engine: Engine,
    resident: ResidentSession,
    segments: Sequence[Segment],
    *,
    keep_distribution: bool,
    on_prompt_end: Callable[[], None],
    on_block: Callable[[int], None] = lambda _: None,
    answers: bool = False,
    before_step: Callable[[int], Steps[None]] | None = None,
    source: LayerSource | None = None,
    score: Callable[[Tensor, Sequence[int]], None] | None = None,
    beginning: int = 0,
    cuts: Sequence[int] = (),
    splice: Splice | None = None,
) -> Steps[PrefillResult]:
    """Append the pending tokens and the segments; yields between blocks.

    Yields a write to wait for when the store falls behind, else None. A layer holds at most as many rows as the
    budget and a block. With `keep_distribution`, the result has the next-token distribution at every recorded
    token. `on_prompt_end` is called once the tokens before the first recorded one are appended, `on_block` with
    the tokens of each block. Where an answer follows (`answers`), the last tokens of the prompt are steps of
    their own, which retrieve as the answer's will (`Retrieval.prompt_tokens`), unless blocks attend to every
    row. With `keep_distribution` recorded text is appended in steps, where decoding attends to other rows than
    blocks do. `before_step` runs before each, with the number of recorded tokens that are appended already,
    negative in the prompt. source: of the stored rows, the engine's store unless given. `score` is called with
    the logits of each block and the tokens that follow. `beginning`: first tokens that other sessions may begin
    with, where recurrent states are stored. `cuts`: numbers of tokens that blocks end at, in a replay.
    `splice`: rows of other sessions, between those of the tokens.
    """
    token_ids, recorded = _take_tokens(resident.session, segments)
    expected: list[Tensor] = []
    prompt = recorded.index(True) if True in recorded else len(recorded)
    stepped = len(recorded) - prompt if keep_distribution and _steps_differ(resident.config) else 0
    decoded = stepped + _count_prompt_steps(resident.config, answers=answers or stepped > 0)
    most = len(token_ids) - decoded if splice is None else splice.before
    ends = _find_boundaries(engine, resident, (beginning, most))
    cuts = (*ends, *_find_cuts(engine, resident.session, len(token_ids), splice), *cuts)
    logits = torch.empty(0)
    for block in _split(len(token_ids), engine.settings.block_tokens, decoded, cuts):
        wanted = _find_wanted(block, recorded) if keep_distribution else []
        if splice is not None and block.start == splice.before:
            yield from _append_splice(engine, resident, splice, source)
        if block.decodes and before_step is not None:
            yield from before_step(block.start - prompt)
        kept = block.tokens if wanted or score else 1
        block_logits = yield from _append(engine, resident, block, token_ids, kept, source)
        on_block(block.tokens)
        if block.start < prompt <= block.stop:
            on_prompt_end()
        if score is not None:
            _score_block(score, block, block_logits, token_ids)
        if wanted:
            expected.append(block_logits[wanted].log_softmax(-1).cpu())
        logits = block_logits[-1]
        if not block.decodes:
            _end_block(engine, resident, block, ends)
        yield engine.store_io.backlog(resident.session)
    joined = _join_distribution(token_ids, recorded, expected)
    return PrefillResult(logits, joined, len(token_ids), stepped)


def _score_block(
    score: Callable[[Tensor, Sequence[int]], None],
    block: _Block,
    logits: Tensor,
    token_ids: Sequence[int],
) -> None:
    """Score the tokens that follow a block's by its logits, `[t, vocabulary]`; none follows the last."""
    after = token_ids[block.start + 1 : block.stop + 1]
    score(logits[: len(after)], after)


def _find_cuts(
    engine: Engine, session: WorkerSession, tokens: int, splice: Splice | None
) -> list[int]:
    """Find where blocks of the next tokens have to end: at chunks of a long session, and at a splice."""
    if splice is None:
        return engine.long_sessions.find_cuts(session, tokens)
    at, more = splice.before, splice.tokens
    cuts = engine.long_sessions.find_cuts(session, tokens + more)
    return [
        *(cut for cut in cuts if cut < at),
        at,
        *(cut - more for cut in cuts if cut > at + more),
    ]


def _join_distribution(
    token_ids: Sequence[int], recorded: Sequence[bool], expected: Sequence[Tensor]
) -> Distribution | None:
    """Join log-probabilities by block, `[t, vocabulary]` each; None where none were kept."""
    if not expected:
        return None
    return Distribution(tuple(compress(token_ids[1:], recorded[1:])), torch.cat([*expected]))


def find_block_end(
    engine: Engine, session: WorkerSession, tokens: int, cuts: Sequence[int] = ()
) -> int:
    """Count the session's next tokens up to the end of the block that has the last of so many `tokens`.

    `cuts` as in `prefill`.
    """
    if not tokens:
        return 0
    size = engine.settings.block_tokens
    chunks = engine.long_sessions.find_cuts(session, tokens + size)
    blocks = _split(tokens + size, size, 0, (*chunks, *cuts))
    return next(block.stop for block in blocks if block.stop >= tokens)


def find_whole_blocks(engine: Engine, session: WorkerSession, tokens: int) -> list[int]:
    """Find the blocks of the session's next tokens that more tokens behind these do not change.

    Returns the number of tokens up to the end of each.
    """
    size = engine.settings.block_tokens
    cuts = engine.long_sessions.find_cuts(session, tokens)
    blocks = _split(tokens, size, 0, cuts)
    return [each.stop for each in blocks if each.tokens == size or each.stop in cuts]


def _find_wanted(block: _Block, recorded: Sequence[bool]) -> list[int]:
    """Find the block's logits that are the distribution of a recorded token: of the one that follows."""
    following = recorded[block.start + 1 : block.stop + 1]
    return [i for i, is_recorded in enumerate(following) if is_recorded]


def _take_tokens(
    session: WorkerSession, segments: Sequence[Segment]
) -> tuple[list[int], list[bool]]:
    """Take the pending tokens and those of the segments; returns them, and which were recorded."""
    session.again = range(session.length, session.length + session.unsettled)
    pending, session.pending, session.unsettled = session.pending, [], 0
    token_ids = [*pending, *(token for segment in segments for token in segment.token_ids)]
    recorded = [False] * len(pending) + [s.recorded for s in segments for _ in s.token_ids]
    return token_ids, recorded


def _append(
    engine: Engine,
    resident: ResidentSession,
    block: _Block,
    token_ids: Sequence[int],
    logits_to_keep: int,
    source: LayerSource | None,
) -> Steps[Tensor]:
    """Append one block of `token_ids`; returns its last logits, `[logits_to_keep, vocabulary]`."""
    attention = None
    if not block.decodes:  # a step attends to the active rows, and to those it retrieves
        attention = yield from begin_block(engine, resident, block.tokens, source)
    began = time.perf_counter()
    tokens = torch.tensor([token_ids[block.start : block.stop]])
    logits = engine.forward([resident], tokens, logits_to_keep, attention)[0]
    seconds = time.perf_counter() - began
    engine.metrics.observe("worker_step_seconds", seconds, kind="prefill")
    engine.prefilled_tokens += block.tokens
    return logits


def _append_splice(
    engine: Engine, resident: ResidentSession, splice: Splice, source: LayerSource | None
) -> Steps[None]:
    """Append a splice. The turn's rows from here on are not exact: they are dropped at its end, with it."""
    session = resident.session
    if session.inexact_from is None:
        session.inexact_from = session.length
    for part in splice.parts:
        session.remembered += count_tokens(part)
        if isinstance(part, Tensor):
            yield from append_rows(engine, resident, part)
            continue
        cuts = engine.long_sessions.find_cuts(session, len(part))
        for block in _split(len(part), engine.settings.block_tokens, 0, cuts):
            yield from _append(engine, resident, block, part, 1, source)
            engine.evict(resident)
            yield engine.store_io.backlog(session)


def _end_block(
    engine: Engine, resident: ResidentSession, block: _Block, ends: Sequence[int]
) -> None:
    """Evict down to the budget, and keep recurrent states at page boundaries up to the last of `ends`."""
    engine.evict(resident)
    whole = block.stop % engine.store.layout.page_tokens == 0
    if whole and ends and block.stop <= ends[-1]:
        keep_states(engine, resident.session, shared=block.stop in ends[:-1])


def _steps_differ(config: SessionConfig) -> bool:
    """Check if a step of decoding may attend to other rows than a block does."""
    return (
        config.prefill.attend == "stored"
        or config.retrieval is not None
        or config.reselection is not None
    )


def _count_prompt_steps(config: SessionConfig, *, answers: bool) -> int:
    """Count the prompt's last tokens that are steps of their own, where an answer follows it."""
    if config.retrieval is None or config.prefill.attend == "stored" or not answers:
        return 0
    return config.retrieval.prompt_tokens


def _find_boundaries(
    engine: Engine, resident: ResidentSession, tokens: Sequence[int]
) -> tuple[int, ...]:
    """Find the last page boundaries among so many first tokens, of models with recurrent states."""
    if not engine.has_states:
        return ()
    page = engine.store.layout.page_tokens
    assert resident.session.length % page == 0, "turns begin at page boundaries"
    return tuple(sorted({count - count % page for count in tokens if count >= page}))


def _split(tokens: int, size: int, decoded: int, ends: Sequence[int]) -> list[_Block]:
    """Split so many tokens into blocks; the last `decoded` are steps of their own.

    A block ends at each of `ends`.
    """
    first = max(0, tokens - decoded)
    blocks = [
        _Block(start, min(stop, start + size))
        for begin, stop in pairwise(sorted({0, first, *(end for end in ends if end < first)}))
        for start in range(begin, stop, size)
    ]
    return [*blocks, *(_Block(start, start + 1, decodes=True) for start in range(first, tokens))]
