"""Repair: score what was evicted against what just became known, and bring the best rows back.

RepairKV section 3 and Algorithm 1, with a deadline, a second look (`hops`) and exchange instead of a reserve. It can
end at any moment with what it has found so far.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.engine.store_io import storage
from workers.generation import convert as wire_values
from workers.generation.decode import NextLogits
from workers.generation.steps import Yielded, written
from workers.model.tokenizer import Segment
from workers.primitives.observation import Observed
from workers.repair.promotion import (
    RowSwap,
    best_of_heads,
    exchange,
    missing_rows,
    move,
    tokens_of,
    whole,
    withdraw,
)
from workers.repair.scan.exact import ScanResult, scan, scan_by_head

_ENOUGH = 0.5
"""The share of the candidates that must be scored before what an earlier repair brought is given up."""


def run_pause_repair(
    engine: Engine, session: WorkerSession, request: wire.RepairRequest, hurried: Callable[[], bool]
) -> Generator[Yielded, NextLogits, wire.RepairResult]:
    """A repair between turns, on the request's signal; it ends once it is `hurried`. Raises BadMessages."""
    messages = [wire_values.to_chat(message) for message in request.messages]
    segments: list[Segment] = []
    if messages:
        segments = engine.tokenizer.prompt(session.recent, messages, session.tools, generate=True)
    rendered = [token for segment in segments for token in segment.token_ids]
    signal = [*request.token_ids, *engine.tokenizer.encode(request.text), *rendered]
    late = deadline(request.seconds)
    report = yield from run_repair(
        engine, session, signal, request.trigger, lambda: hurried() or late()
    )
    session.unsettled = False
    return wire.RepairResult(
        report=report, memory=engine.memory(session), state=engine.snapshot(session)
    )


def deadline(seconds: float) -> Callable[[], bool]:
    """Whether so many seconds from now have passed; 0: they never have."""
    end = time.perf_counter() + seconds
    return lambda: bool(seconds) and time.perf_counter() >= end


def run_repair(
    engine: Engine,
    session: WorkerSession,
    signal: Sequence[int],
    trigger: str,
    hurried: Callable[[], bool],
) -> Generator[Yielded, NextLogits, wire.RepairReport]:
    """Observe the signal, score every evicted token against it, and make the best `repair_rows` of them active.

    What an earlier repair brought back is chosen anew with the rest. Cut by `hurried` it takes the best of what was
    scored; it leaves what an earlier repair brought when it could score less than half.
    """
    started = time.perf_counter()
    report = wire.RepairReport(trigger=trigger, signal_tokens=len(signal))
    if session.repair_rows and session.length and signal:
        session.unsettled = True
        yield from written(engine, session)
        while report.hops < session.repair.hops and not report.truncated:
            yield from _hop(engine, session, signal, report, hurried)
    report.seconds = time.perf_counter() - started
    return report


def _hop(
    engine: Engine,
    session: WorkerSession,
    signal: Sequence[int],
    report: wire.RepairReport,
    hurried: Callable[[], bool],
) -> Generator[Yielded, NextLogits, None]:
    """One look: the signal's queries over what is active now, scores, and the move."""
    assert session.slot is not None, "the scheduler seats a session before it runs"
    missing = missing_rows(
        engine.cache, session.slot, session.length, promoted=not session.repair.swap
    )
    candidates = missing.any(0).any(0).cpu()
    report.candidates = int(candidates.sum())
    if hurried():
        report.truncated = True
        return
    report.hops += 1
    observed = engine.observe(session, [*session.pending, *signal])
    yield None
    with storage():
        found = yield from _scored(engine, session, observed, missing, candidates, hurried)
    yield None
    scored = candidates & found.scored
    report.truncated = not found.complete
    report.scored_rows = int(scored.sum())
    share = report.scored_rows / max(1, report.candidates)
    report.bytes_read += found.bytes_read
    if report.truncated and share < (_ENOUGH if session.promoted_rows else 0):
        return
    scores = found.scores.clone()
    # Everything looks at the sinks; they lead to nothing.
    scores[..., : engine.settings.sinks] = 0
    _take(engine, session, scores, missing & found.scored.to(missing.device), scored, report)


def _scored(
    engine: Engine,
    session: WorkerSession,
    observed: Observed,
    missing: Tensor,
    candidates: Tensor,
    hurried: Callable[[], bool],
) -> Generator[Yielded, NextLogits, ScanResult]:
    operator = session.repair
    sinks = engine.settings.sinks

    def find_ambiguous(lower: Tensor, upper: Tensor) -> Tensor:
        lower = lower.clone()
        upper = upper.clone()
        lower[:sinks] = upper[:sinks] = 0
        return operator.ambiguous_tokens(lower, upper, candidates, session.repair_rows)

    of = (engine.store, session.name, observed, session.length)
    device = engine.cache.device
    if operator.per_head:
        found = yield from scan_by_head(*of, stop_requested=hurried, device=device)
        # A head's own and the token's: their sum keeps tokens together that one head alone would tear apart.
        return replace(found, scores=found.scores + found.scores.mean((0, 1)))
    counted = None if operator.counts_active else missing
    how = session.repair_scan
    return (
        yield from scan(
            *of,
            mode=how,
            counted=counted,
            find_ambiguous=find_ambiguous,
            stop_requested=hurried,
            device=device,
        )
    )


def _take(
    engine: Engine,
    session: WorkerSession,
    scores: Tensor,
    missing: Tensor,
    candidates: Tensor,
    report: wire.RepairReport,
) -> None:
    """Make the best candidates active, in place of what an earlier repair brought, or of active rows worth less."""
    operator = session.repair
    settings = engine.settings
    worth = operator.utility(scores)
    if operator.per_head:
        wanted = best_of_heads(worth, missing, session.repair_rows)
    else:
        chosen = operator.choose(
            worth, candidates, session.scores_of_evicted(), session.repair_rows
        )
        wanted = whole(chosen, missing)
    change = RowSwap(wanted)
    if operator.swap:
        assert session.slot is not None, "the scheduler seats a session before it runs"
        engine.cache.clear_promoted(session.slot)
        change = exchange(engine.cache, session, wanted, worth, settings.sinks, settings.recent)
    else:
        withdraw(engine.cache, session)
    with storage():
        move(engine.cache, engine.store, session, change, worth)
    report.promoted[:] = tokens_of(change.promoted).tolist()
    report.demoted_rows += change.demoted_rows()
