"""Block prefill: appends new tokens in blocks, each followed by eviction (EpiCache section 2.2)."""

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.engine.engine import Engine
from workers.engine.session import Distribution, ResidentSession
from workers.model.tokenizer import Segment


@dataclass(frozen=True)
class PrefillResult:
    """Logits after the last token, float32 `[vocabulary]`, and the distribution if asked for.

    `tokens` were computed.
    """

    logits: Tensor
    distribution: Distribution | None
    tokens: int


def prefill(
    engine: Engine,
    resident: ResidentSession,
    segments: Sequence[Segment],
    *,
    keep_distribution: bool,
    on_prompt_end: Callable[[], None],
    on_block: Callable[[int], None] = lambda _: None,
) -> Generator["Future[Any] | None", None, PrefillResult]:
    """Append the pending tokens and the segments; yields between blocks.

    Yields a write to wait for when the store falls behind, otherwise None. A layer never holds more
    rows than the budget and a block. With `keep_distribution`, the result has the next-token
    distribution at every recorded token. `on_prompt_end` is called once the tokens before the first
    recorded one are appended: at the first token's logits, if there were no recorded text.
    `on_block` is called with the tokens of each block that is appended.
    """
    session = resident.session
    pending = session.pending
    token_ids = [*pending, *(token for segment in segments for token in segment.token_ids)]
    recorded = [False] * len(pending) + [s.recorded for s in segments for _ in s.token_ids]
    session.pending = []
    expected: list[Tensor] = []
    size = engine.settings.block_tokens
    prompt = recorded.index(True) if True in recorded else len(recorded)
    logits = torch.empty(0)
    for start in range(0, len(token_ids), size):
        block = token_ids[start : start + size]
        # The logits at a token are the distribution of the next one.
        wanted = [
            i
            for i in range(len(block))
            if keep_distribution and any(recorded[start + i + 1 : start + i + 2])
        ]
        logits_to_keep = len(block) if wanted else 1
        began = time.perf_counter()
        block_logits = engine.forward([resident], torch.tensor([block]), logits_to_keep)[0]
        seconds = time.perf_counter() - began
        engine.metrics.observe("worker_step_seconds", seconds, kind="prefill")
        engine.prefilled_tokens += len(block)
        on_block(len(block))
        if start < prompt <= start + size:
            on_prompt_end()
        if wanted:
            expected.append(block_logits[wanted].log_softmax(-1).cpu())
        logits = block_logits[-1]
        engine.evict(resident)
        yield engine.store_io.backlog(session)
    if not expected:
        return PrefillResult(logits, None, len(token_ids))
    recorded_tokens = tuple(
        token for token, is_recorded in zip(token_ids[1:], recorded[1:], strict=True) if is_recorded
    )
    distribution = Distribution(recorded_tokens, torch.cat(expected))
    return PrefillResult(logits, distribution, len(token_ids))
