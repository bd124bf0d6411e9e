"""Block prefill: new tokens go in block by block, each followed by eviction (EpiCache section 2.2)."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.engine.engine import Engine
from workers.engine.session import Distribution, WorkerSession
from workers.model.tokenizer import Segment


@dataclass(frozen=True)
class Prefilled:
    """Logits after the last token, float32 `[vocabulary]`; what the model expected of recorded text, if asked."""

    logits: Tensor
    distribution: Distribution | None


def prefill(
    engine: Engine,
    session: WorkerSession,
    segments: Sequence[Segment],
    *,
    keep_distribution: bool,
    prompt_said: Callable[[], None],
) -> Generator["Future[Any] | None", None, Prefilled]:
    """Say the pending tokens and the segments; yields between blocks, so that others get their turn.

    What it yields is a write to wait for, when the store falls behind. Never more than the budget and a block of
    rows are in a layer. With `keep_distribution`, the next-token distribution at every recorded token is returned
    as well. `prompt_said` is called when the model knows what it would say first, were the recorded words not there.
    """
    token_ids = [*session.pending, *(token for segment in segments for token in segment.token_ids)]
    recorded = [False] * len(session.pending) + [s.recorded for s in segments for _ in s.token_ids]
    session.pending = []
    expected: list[Tensor] = []
    size = engine.settings.block_tokens
    prompt = recorded.index(True) if True in recorded else len(recorded)
    logits = torch.empty(0)
    for start in range(0, len(token_ids), size):
        block = token_ids[start : start + size]
        # Logits at a token say what was expected of the next one.
        wanted = [
            i
            for i in range(len(block))
            if keep_distribution and any(recorded[start + i + 1 : start + i + 2])
        ]
        all_logits = engine.forward([session], torch.tensor([block]), len(block) if wanted else 1)[
            0
        ]
        if start < prompt <= start + size:
            prompt_said()
        if wanted:
            expected.append(all_logits[wanted].log_softmax(-1).cpu())
        logits = all_logits[-1]
        engine.evict(session)
        yield engine.storing.backlog(session)
    if not expected:
        return Prefilled(logits, None)
    heard = tuple(
        t for t, was_recorded in zip(token_ids[1:], recorded[1:], strict=True) if was_recorded
    )
    return Prefilled(logits, Distribution(heard, torch.cat(expected)))
