"""A turn, as a generator that the scheduler drives (see `workers.generation.steps.Yielded`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvrecall.domain.answer.constraints import ToolChoice
from kvrecall.domain.messages import Sampling
from kvrecall.domain.phases import Phase
from kvrecall.domain.rewrites.rewrite import Rewrite
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.stopwatch import Stopwatch
from workers.capabilities import attach
from workers.engine.ahead import Ahead
from workers.engine.engine import Engine
from workers.engine.session import Distribution, ResidentSession, WorkerSession
from workers.engine.truncation import truncate
from workers.episodes.rows import EpisodeRows
from workers.episodes.switch import read_episode, switch
from workers.errors import BadMessages, NotComparable, TurnTooLong, UnknownSession
from workers.generation.decode import Answer, Emitted, Start, decode
from workers.generation.guide import build_guide
from workers.generation.logprobs import PromptScores, report_logprobs
from workers.generation.prefill import PrefillResult, prefill
from workers.generation.rendering import build_grammars, count_beginning, render_prompt
from workers.generation.sampling import Sampler, require_valid
from workers.generation.settling import end_rows, settle
from workers.generation.steps import Steps, wait_for_writes
from workers.generation.utterances import utterance_tokens
from workers.model.calls.ids import name_call
from workers.model.calls.sink import CallPiece, ParsedCall
from workers.model.grammars import CompiledGrammars
from workers.model.text_stream import TextStream
from workers.model.tokenizer import ChatMessage, Segment, keep_recent
from workers.repair.repair import run_repair
from workers.tasks.ahead import go_on_behind
from workers.tasks.limits import get_limit
from workers.tasks.prefix import skip_tokens, take_prefix
from workers.tasks.remembering import count_before_last, fit_passages, prepare_splice
from workers.tasks.rewriting import apply_rewrite, plan_rewrite
from workers.tasks.step import prepare_step
from workers.tasks.turn_signal import build_signal, defer_signal

Emit = Callable[[pb.TurnEvent], None]


@dataclass(frozen=True)
class _TurnPlan:
    """A validated turn: rendered prompt, sampling, grammars, comparison and episode.

    `answer_start`: the position of the answer's first token, after pending tokens and prompt.
    `beginning`: the prompt's first tokens that other conversations have as well.
    `rewrite`: of earlier turns, before anything is appended.
    `ahead`: the rows that were computed before the turn.
    `remembered`: passages of other sessions, as far as there is room for them.
    """

    request: pb.TurnRequest
    messages: tuple[ChatMessage, ...]
    segments: tuple[Segment, ...]
    prompt: tuple[int, ...]
    sampling: Sampling
    grammars: CompiledGrammars
    reference: Distribution | None
    episode: EpisodeRows | None
    answer_start: int
    beginning: int
    rewrite: Rewrite | None
    ahead: Ahead | None
    remembered: Sequence[pb.Passage]

    @property
    def looks_at_all(self) -> bool:
        """True if the logits at every token of the prompt are wanted."""
        return (
            self.reference is not None
            or self.request.keep_distribution
            or self.sampling.prompt_logprobs is not None
        )


@dataclass(frozen=True)
class _TurnRun:
    """A turn that is running: its result so far, its stream and its timing."""

    done: pb.TurnDone
    emit: Emit
    watch: Stopwatch[Phase]
    before_step: Callable[[int], Steps[None]]


@dataclass(frozen=True)
class _Before:
    """The session as a turn finds it: its rows, and the pending tokens that it computes first."""

    length: int
    pending: tuple[int, ...]


def run_turn(
    engine: Engine, resident: ResidentSession, request: pb.TurnRequest, emit: Emit
) -> Steps[pb.TurnDone]:
    """Run one turn: settle, episode and repair if asked for, prefill, decode, evict, flush.

    Raises UnknownSession, BadMessages, BadSettings, BadEpisode and TurnTooLong before anything has
    changed, NotComparable also afterwards.
    """
    capabilities = attach(resident.session)
    run = _TurnRun(
        pb.TurnDone(finish_reason="appended"),
        emit,
        Stopwatch(),
        lambda output_tokens: prepare_step(engine, resident, output_tokens),
    )
    plan = yield from _plan_turn(engine, resident, request, emit)
    session = resident.session
    done = run.done
    done.prompt_tokens = len(plan.prompt)
    session.dirty = True
    if plan.rewrite is not None:
        yield from apply_rewrite(engine, resident, plan.rewrite, request.earlier)
        done.rewrite.MergeFrom(convert.rewrite_to_wire(plan.rewrite))
        run.watch.lap(Phase.REWRITE)
    before = yield from _begin(engine, resident, plan, run)
    yield from _switch_and_repair(engine, resident, plan, run)
    prefilled = yield from _prefill(engine, resident, plan, run)
    messages = list(plan.messages)
    token_ids = list(plan.prompt)
    if request.generate:
        answer = yield from _generate(engine, resident, plan, prefilled, run)
        # A truncated answer is closed by an end of turn that the model did not generate.
        token_ids += [*answer.token_ids, *session.pending[1:]]
        done.output_tokens = len(answer.token_ids)
        done.reasoning_tokens = answer.reasoning_tokens
        messages.append(_build_answer(done, answer, plan.answer_start, request.opening))
    session.recent = keep_recent([*session.recent, *messages])
    _note_anchor(session, plan.messages)
    session.deferred_signal = (
        defer_signal(session, plan.segments, engine.settings.block_tokens)
        if request.defer_repair
        else []
    )
    done.deferred_tokens = len(session.deferred_signal)
    session.distribution = prefilled.distribution if request.keep_distribution else None
    if plan.reference is not None:
        done.fidelity.CopyFrom(compare_distributions(plan.reference, prefilled.distribution))
    for capability in capabilities:
        capability.report(done, engine.group)
    engine.metrics.inc("worker_retrieved_rows_total", done.retrieval.rows)
    yield from _evict_and_flush(engine, resident, run, before, token_ids)
    _count_tokens(done, plan, token_ids)
    done.pending_pages = len(session.pending) // engine.store.layout.page_tokens
    done.seconds.update(run.watch.seconds)
    done.phase_starts.update(run.watch.starts)
    session.dirty = False
    return done


def _begin(
    engine: Engine, resident: ResidentSession, plan: _TurnPlan, run: _TurnRun
) -> Steps[_Before]:
    """Settle the session, unless the turn goes on behind what was computed of its prompt."""
    session = resident.session
    if plan.ahead is not None:
        return _Before(plan.ahead.length, plan.ahead.pending)
    settled = run.done.settled_tokens = yield from settle(engine, resident)
    engine.metrics.inc("worker_settled_tokens_total", settled, when="turn")
    if settled:
        run.watch.lap(Phase.SETTLE)
    session.clear_turn()
    session.turn_start = session.length
    return _Before(session.length, tuple(session.pending))


def _note_anchor(session: WorkerSession, messages: Sequence[ChatMessage]) -> None:
    """Note the recurrent state before the answers that a later user's message may rewrite."""
    if any(message["role"] == "user" for message in messages):
        session.anchor = session.snapshot.position


def _plan_turn(
    engine: Engine, resident: ResidentSession, request: pb.TurnRequest, emit: Emit
) -> Steps[_TurnPlan]:
    """Validate the request and report its tokens. Raises what `run_turn` raises before any change."""
    session = resident.session
    _require_committed(session, request)
    messages = tuple(convert.to_chat(message) for message in request.messages)
    sampling = convert.sampling_from_wire(request.sampling)
    require_valid(sampling, engine.model.vocabulary)
    grammars = CompiledGrammars()
    if request.generate or sampling.prompt_logprobs is not None:
        grammars = yield from build_grammars(engine, session, sampling)
    if request.prompt:
        segments = [_read_prompt(engine, request.prompt)]
    else:
        segments = yield from render_prompt(
            engine, session, messages, generate=request.generate, opening=request.opening
        )
    prompt = tuple(token for segment in segments for token in segment.token_ids)
    if not prompt:
        raise BadMessages("the turn is empty: its messages render to no token")
    reference = _get_reference(engine, request)
    episode = None
    if request.HasField("episode"):
        episode = read_episode(engine, session, request.episode)
    rewrite = yield from plan_rewrite(engine, session, request.earlier, messages)
    held = session.committed_tokens
    held -= 0 if rewrite is None else rewrite.dropped_tokens
    planned = pb.TurnPlanned(
        held_tokens=held,
        prompt_tokens=len(prompt),
        max_tokens=get_limit(engine, resident),
    )
    emit(pb.TurnEvent(planned=planned))
    room = planned.max_tokens - planned.held_tokens - planned.prompt_tokens
    if room < (1 if request.generate else 0):
        end = engine.long_sessions.explain_limit(resident.config, planned.max_tokens)
        raise TurnTooLong(
            f"the turn has {planned.prompt_tokens} tokens after {planned.held_tokens}; {end}"
        )
    remembered = fit_passages(request.remembered, room // 2)
    room -= sum(each.stop - each.start for each in remembered)
    plan = _TurnPlan(
        request,
        messages,
        tuple(segments),
        prompt,
        sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room),
        grammars,
        reference,
        episode,
        held + len(prompt),
        (yield from count_beginning(engine, session, messages, prompt)),
        rewrite,
        None,
        remembered,
    )
    changes = bool(rewrite or episode or request.repair or remembered)
    ahead = go_on_behind(engine, session, prompt, as_committed=changes or plan.looks_at_all)
    return replace(plan, ahead=ahead)


def _read_prompt(engine: Engine, token_ids: Sequence[int]) -> Segment:
    """Read a prompt that is given as tokens. Raises BadMessages for one that the model has not."""
    unknown = [token for token in token_ids if token >= engine.model.vocabulary]
    if unknown:
        known = engine.model.vocabulary
        raise BadMessages(
            f"the prompt has token {unknown[0]}; the model has tokens 0 to {known - 1}"
        )
    return Segment(tuple(token_ids), recorded=False)


def _require_committed(session: WorkerSession, request: pb.TurnRequest) -> None:
    """Raise UnknownSession unless the session is as committed: a catalog may have been restored."""
    rows = session.committed_rows
    if request.HasField("length") and request.length != rows:
        raise UnknownSession(
            f"session {session.name} has {rows} rows in this worker, but "
            f"{request.length} are committed; open it again"
        )


def _switch_and_repair(
    engine: Engine, resident: ResidentSession, plan: _TurnPlan, run: _TurnRun
) -> Steps[None]:
    """Make the episode's rows active, then promote rows for the prompt, as far as asked for."""
    request = plan.request
    if plan.episode is not None:
        yield from wait_for_writes(engine, resident.session)
        run.done.switched.CopyFrom(switch(engine, resident, request.episode, plan.episode))
        run.watch.lap(Phase.SWITCH)
    if not request.repair or not resident.config.repair_rows:
        return
    if not engine.cache.holds_all(resident.slot, resident.session.length):
        signal, asked = yield from build_signal(engine, resident, plan.messages, plan.prompt)
        report = yield from run_repair(engine, resident, signal, "turn", asked=asked)
        run.done.repair.CopyFrom(report)
        run.watch.lap(Phase.REPAIR)


def _prefill(
    engine: Engine, resident: ResidentSession, plan: _TurnPlan, run: _TurnRun
) -> Steps[PrefillResult]:
    """Append the prompt's tokens, but for those of a shared prefix."""
    request = plan.request
    watch = run.watch
    compares = plan.reference is not None
    most = plan.sampling.prompt_logprobs
    taken, splice = 0, None
    # What comes behind rows of other sessions follows from them, and is no other session's.
    own = len(plan.prompt)
    if plan.remembered:
        own = yield from count_before_last(engine, resident.session, plan.messages, plan.prompt)
    if plan.ahead is not None:
        taken = plan.ahead.prompt_tokens
    elif not (plan.looks_at_all or resident.session.length or resident.session.pending):
        taken = yield from take_prefix(engine, resident, plan.prompt[:own])
        run.done.shared_pages = taken // engine.store.layout.page_tokens
        watch.lap(Phase.SHARE)
    if plan.remembered:
        before = len(resident.session.pending) + own - taken
        splice, report = yield from prepare_splice(engine, resident, plan.remembered, before)
        run.done.remembered.CopyFrom(report)
        run.done.remembered.behind = own
        watch.lap(Phase.REMEMBER)
    recorded = any(segment.recorded for segment in plan.segments)
    scores = None if most is None else PromptScores(engine.grammars, plan.prompt[0], most)
    prefilled = yield from prefill(
        engine,
        resident,
        skip_tokens(plan.segments, taken),
        keep_distribution=request.keep_distribution or compares,
        on_prompt_end=lambda: watch.lap(Phase.PREFILL) if recorded else None,
        on_block=lambda tokens: watch.mark("block", tokens=tokens),
        answers=request.generate,
        before_step=run.before_step,
        score=None if scores is None else scores.score,
        beginning=max(0, plan.beginning - taken),
        splice=splice,
    )
    if scores is not None:
        run.done.prompt_logprobs.extend(scores.reported)
    run.done.prefilled_tokens = run.done.settled_tokens + prefilled.tokens
    run.done.recorded_tokens = prefilled.recorded
    watch.lap(Phase.APPEND if recorded else Phase.PREFILL)
    return prefilled


def _generate(
    engine: Engine,
    resident: ResidentSession,
    plan: _TurnPlan,
    prefilled: PrefillResult,
    run: _TurnRun,
) -> Steps[Answer]:
    """Decode the answer, each token streamed as it is generated."""

    def emit(emitted: Emitted) -> None:
        if Phase.FIRST_TOKEN not in run.watch.seconds:
            run.watch.split(Phase.FIRST_TOKEN)
        chunk = pb.TokenChunk(
            ids=[emitted.token],
            text=emitted.piece.text,
            reasoning=emitted.piece.reasoning,
            logprobs=report_logprobs(engine.grammars, emitted),
        )
        run.emit(pb.TurnEvent(token=chunk))
        for event in _report_calls(emitted.piece.calls, plan.answer_start):
            run.emit(event)

    session = resident.session
    start = session.length
    answer = yield from decode(
        session,
        engine.tokenizer,
        _start(engine, resident, plan, prefilled),
        emit,
        run.before_step,
        engine.group,
    )
    session.forget_last(truncate(engine.caches, resident, start + len(answer.token_ids) - 1))
    run.watch.lap(Phase.DECODE)
    return answer


def _start(
    engine: Engine, resident: ResidentSession, plan: _TurnPlan, prefilled: PrefillResult
) -> Start:
    """Start the answer: its stream, its constraint and its sampler."""
    sampling = plan.sampling
    constraint = sampling.constraint
    plain = bool(plan.request.prompt)
    stream = TextStream(
        engine.tokenizer,
        sampling.stop,
        reasons=False if plain else engine.tokenizer.opens_reasoning(plan.prompt),
        calls=constraint.tool_choice is not ToolChoice.NONE and not plain,
        tools=resident.config.tools,
        verbatim=plain or bool(plan.request.opening),
    )
    guide = build_guide(engine.grammars, plan.grammars, constraint, engine.tokenizer, stream)
    ends = (*engine.tokenizer.eos_token_ids, *sampling.stop_token_ids)
    return Start(
        prefilled.logits,
        Sampler(sampling, guide, ends),
        stream,
        sampling.max_tokens,
        frozenset(ends),
    )


def _report_calls(pieces: Sequence[CallPiece], answer_start: int) -> Iterator[pb.TurnEvent]:
    """Yield the events of what a token adds to calls."""
    for piece in pieces:
        if piece.arguments:
            delta = pb.ArgumentsDelta(
                index=piece.index,
                id=name_call(answer_start, piece.index, piece.number),
                name=piece.name,
                arguments=piece.arguments,
            )
            yield pb.TurnEvent(arguments=delta)
        if piece.call is not None:
            yield pb.TurnEvent(tool_call=_build_call(piece.call, answer_start, piece.index))


def _build_call(call: ParsedCall, answer_start: int, index: int) -> pb.ToolCall:
    id = name_call(answer_start, index, call.number)
    return pb.ToolCall(id=id, name=call.name, arguments=call.arguments)


def _build_answer(
    done: pb.TurnDone, answer: Answer, answer_start: int, opening: str
) -> ChatMessage:
    """Fill in the assistant's message; returns it for rendering.

    opening: what the message begins with, before what was generated.
    """
    parsed = answer.parsed
    calls = [_build_call(call, answer_start, i) for i, call in enumerate(parsed.calls)]
    ended = not answer.stop_sequence and answer.finish_reason == "stop"
    whole = bool(calls) and (ended or parsed.calls[-1].complete)
    done.finish_reason = "tool_calls" if whole else answer.finish_reason
    done.stop_sequence = answer.stop_sequence
    done.message.CopyFrom(
        pb.Message(
            role="assistant",
            content=opening + parsed.text,
            tool_calls=calls,
            reasoning=parsed.reasoning,
        )
    )
    return convert.to_chat(done.message)


def _count_tokens(done: pb.TurnDone, plan: _TurnPlan, token_ids: Sequence[int]) -> None:
    """Add the turn's tokens, and their counts by side."""
    done.token_ids.extend(token_ids)
    answered = len(token_ids) - done.prompt_tokens if plan.request.generate else None
    roles = [message.role for message in plan.request.messages] or ["user"]
    done.utterance_tokens.extend(utterance_tokens(roles, plan.segments, answered))


def _evict_and_flush(
    engine: Engine,
    resident: ResidentSession,
    run: _TurnRun,
    before: _Before,
    token_ids: Sequence[int],
) -> Steps[None]:
    """End the turn: keep whole pages (`end_rows`), make them durable, report memory and state."""
    session = resident.session
    engine.cache.clear_promoted(resident.slot)
    session.promoted_rows = 0
    end_rows(engine, resident, before.length, [*before.pending, *token_ids])
    session.clear_turn()
    run.watch.lap(Phase.EVICT)
    yield engine.store_io.flush(session)
    run.done.durable = all(engine.group.gather(engine.store_io.wait_written(session)))
    run.watch.lap(Phase.FLUSH)
    run.done.memory.CopyFrom(engine.memory(session))
    run.done.state.CopyFrom(engine.snapshot(session))


def _get_reference(engine: Engine, request: pb.TurnRequest) -> Distribution | None:
    """The distribution to compare with, if one is named. Raises NotComparable."""
    if not request.compare_with:
        return None
    other = engine.sessions.get(request.compare_with)
    distribution = None if other is None else other.distribution
    if distribution is None:
        raise NotComparable(
            f"session {request.compare_with} has no log-probabilities of its last turn in memory; "
            "run that turn with logprobs.save, and this one soon after it"
        )
    return distribution


def compare_distributions(reference: Distribution, measured: Distribution | None) -> pb.Fidelity:
    """Mean KL(reference || measured) in nats and top-1 agreement, token by token.

    Raises NotComparable for distributions on different tokens.
    """
    if measured is None or measured.token_ids != reference.token_ids:
        raise NotComparable("the two sessions did not get the same recorded tokens in this turn")
    log_ratio = reference.log_probs - measured.log_probs
    divergence = (reference.log_probs.exp() * log_ratio).sum(-1)
    agree = reference.log_probs.argmax(-1) == measured.log_probs.argmax(-1)
    return pb.Fidelity(
        tokens=len(measured.token_ids),
        kl_mean=max(0.0, float(divergence.mean())),
        top1_agreement=float(agree.float().mean()),
    )
