"""Repair: score the evicted rows against a signal and promote the best of them.

RepairKV section 3 and Algorithm 1, with a deadline, swaps in place of a reserve, and a contrast: the
signal's attention less that of a neutral signal.
A repair can stop early at any moment, with the best rows of those scored so far.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.engine.stored.store_io import map_store_errors
from workers.generation.host_copy import open_host_copy
from workers.generation.rendering import encode_text, render_prompt
from workers.generation.steps import Steps, wait_for_writes
from workers.parallel.group import Group
from workers.primitives.observation import Observed
from workers.repair.observe import observe_contrast, observe_signal
from workers.repair.promotion import (
    RowSwap,
    apply_swap,
    demote_promoted,
    expand_to_heads,
    missing_rows,
    pair_rows,
    unique_tokens,
)
from workers.repair.scan.keys import CopiedKeys, KeySource, SeenKeys, StoredKeys
from workers.repair.scan.result import ScanResult
from workers.repair.scan.softmax import Contrast, Signal
from workers.repair.scan.tokens import scan_tokens

# Share of the candidates that a truncated repair must have scored before it replaces the rows of an
# earlier one.
_MIN_SCORED_SHARE = 0.5


@dataclass(frozen=True)
class _Candidates:
    """Evicted rows, bool `[n_layers, n_kv_heads, length]`, and their tokens, bool `[length]`."""

    rows: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class _Queries:
    """The observed queries of the signal, and those of the neutral signal if there is one.

    `wanted`: number of tokens whose queries the signal has if nothing stops its observation.
    """

    signal: Observed
    contrast: Contrast | None
    wanted: int


def run_pause_repair(
    engine: Engine,
    resident: ResidentSession,
    request: pb.RepairRequest,
    stop_requested: Callable[[], bool],
) -> Steps[pb.RepairResult]:
    """Repair between turns, on the request's signal, until `stop_requested`. Raises BadMessages."""
    session = resident.session
    session.require_committed()
    messages = [convert.to_chat(message) for message in request.messages]
    segments = yield from render_prompt(engine, session, messages, generate=True)
    rendered = [token for segment in segments for token in segment.token_ids]
    text = yield from encode_text(engine, session, request.text)
    signal = [*request.token_ids, *text, *rendered]
    report = yield from run_repair(engine, resident, signal, request.trigger, stop_requested)
    session.dirty = False
    return pb.RepairResult(
        report=report, memory=engine.memory(session), state=engine.snapshot(session)
    )


@dataclass(frozen=True)
class _Limit:
    """A repair's end: a request to stop, or the time `end` of `time.perf_counter`; rank 0's of a `group`."""

    stop_requested: Callable[[], bool]
    end: float
    group: Group

    def reached(self) -> bool:
        """Check if the repair must end."""
        return self.group.lead(self.stop_requested() or time.perf_counter() >= self.end)

    def halfway(self) -> "_Limit":
        """Limit to half of the remaining time."""
        return replace(self, end=(time.perf_counter() + self.end) / 2)


def run_repair(
    engine: Engine,
    resident: ResidentSession,
    signal: Sequence[int],
    trigger: str,
    stop_requested: Callable[[], bool] = lambda: False,
    *,
    asked: int | None = None,
) -> Steps[pb.RepairReport]:
    """Observe the signal, score every evicted token against it, promote the best `repair_rows`.

    With `asked` the last so many tokens are the signal, and those before them its context.

    It stops early when `stop_requested` says so, or at the session's deadline (`repair_seconds`);
    at most half of that time goes into the observation.

    Rows that an earlier repair promoted are selected again with the rest. Stopped early, it takes the
    best of the tokens scored so far; it keeps the earlier repair's rows if it scored less than half.
    """
    started = time.perf_counter()
    session = resident.session
    config = resident.config
    seconds = config.options.repair_seconds
    end = started + (math.inf if seconds is None else seconds)
    limit = _Limit(stop_requested, end, engine.group)
    report = pb.RepairReport(trigger=trigger, signal_tokens=asked or len(signal))
    wanted = asked or len(session.unread) + len(signal)
    if config.repair_rows and session.length and signal:
        session.dirty = True
        yield from wait_for_writes(engine, session)
        candidates = _find_candidates(engine, resident)
        report.candidates = int(candidates.tokens.sum())
        report.truncated = report.candidates > 0 and limit.reached()
        if report.candidates and not report.truncated:
            halfway = limit.halfway()
            contrast = yield from observe_contrast(engine, resident)
            observed = yield from observe_signal(engine, resident, signal, halfway.reached, asked)
            queries = _Queries(observed, contrast, min(wanted, engine.settings.signal_tokens))
            yield from _score_and_promote(engine, resident, queries, candidates, report, limit)
    report.seconds = time.perf_counter() - started
    return report


def _score_and_promote(
    engine: Engine,
    resident: ResidentSession,
    queries: _Queries,
    candidates: _Candidates,
    report: pb.RepairReport,
    limit: _Limit,
) -> Steps[None]:
    """Repair after the observation: score the evicted rows, contrast, select, promote."""
    session = resident.session
    observed = queries.signal.tokens
    report.observed_tokens = min(report.signal_tokens, observed)
    with map_store_errors():
        result = yield from _scan_rows(engine, resident, queries, candidates, limit.reached)
    yield None
    scored = candidates.tokens & result.scored
    report.truncated = not result.complete or observed < queries.wanted
    report.scored_rows = int(scored.sum())
    report.bytes_read = sum(engine.group.gather(result.bytes_read))
    share = report.scored_rows / max(1, report.candidates)
    if report.truncated and share < (_MIN_SCORED_SHARE if session.promoted_rows else 0):
        return
    scores = result.scores.clone()
    # Every query attends to the sinks: they must not promote their neighbours.
    scores[..., : engine.settings.sinks] = 0
    scored_rows = candidates.rows & result.scored.to(candidates.rows.device)
    _promote_best(engine, resident, scores, _Candidates(scored_rows, scored), report)


def _find_candidates(engine: Engine, resident: ResidentSession) -> _Candidates:
    rows = missing_rows(
        engine.cache,
        resident.slot,
        resident.session.length,
        promoted=not resident.config.repair.swap,
    )
    return _Candidates(rows, engine.group.any(rows.any(0).any(0)).cpu())


def _scan_rows(
    engine: Engine,
    resident: ResidentSession,
    queries: _Queries,
    candidates: _Candidates,
    stop_requested: Callable[[], bool],
) -> Steps[ScanResult]:
    """Score the session's tokens."""
    operator = resident.config.repair
    device = engine.cache.device
    signal = Signal(
        queries.signal, engine.store.layout.n_kv_heads, device, queries.contrast, engine.group
    )
    keys = yield from _open_keys(engine, resident)
    counted = None if operator.counts_active else candidates.rows
    return (yield from scan_tokens(keys, signal, counted=counted, stop_requested=stop_requested))


def _open_keys(engine: Engine, resident: ResidentSession) -> Steps[KeySource]:
    """Open the session's copy in host memory, or its stored pages where memory has no room."""
    session, transfers = resident.session, engine.cache.transfers
    opened = yield from open_host_copy(engine, resident)
    keys: KeySource = (
        StoredKeys(engine.store, session.name, session.length, transfers)
        if opened is None
        else CopiedKeys(*opened, transfers)
    )
    seen = engine.long_sessions.view(session)
    return keys if seen is None else SeenKeys(keys, seen)


def _promote_best(
    engine: Engine,
    resident: ResidentSession,
    scores: Tensor,
    candidates: _Candidates,
    report: pb.RepairReport,
) -> None:
    """Promote the best candidates, in place of the last repair's rows or of other active rows."""
    config = resident.config
    operator = config.repair
    settings = engine.settings
    utility = operator.utility(scores)
    tie_break = resident.session.eviction_scores.to_dense(resident.session.length)
    chosen = operator.choose(utility, candidates.tokens, tie_break, config.repair_rows)
    wanted = expand_to_heads(chosen, candidates.rows)
    swap = RowSwap(wanted)
    if operator.swap:
        engine.cache.clear_promoted(resident.slot)
        swap = pair_rows(engine.cache, resident, wanted, utility, settings.sinks, settings.recent)
    else:
        demote_promoted(engine.cache, resident)
    with map_store_errors():
        apply_swap(engine.cache, engine.store, resident, swap, utility)
    report.promoted[:] = unique_tokens(swap.promoted, engine.group).tolist()
    report.demoted_rows = swap.demoted_rows(engine.group)
