"""A turn, as a generator that the scheduler drives.

It yields None to let others run, a Future to wait for, or a token id to have it said in the next decoding
step; to a token id the scheduler answers with `NextLogits`.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.engine.engine import Engine
from workers.engine.session import Distribution, WorkerSession
from workers.episodes.switch import EpisodeRows, read_episode, switch
from workers.errors import BadMessages, NotComparable, TurnTooLong
from workers.generation import convert as wire_values
from workers.generation.decode import Answer, NextLogits, decode
from workers.generation.prefill import prefill
from workers.generation.sampling import SamplingSettings
from workers.generation.steps import Stopwatch, Yielded, written
from workers.generation.utterances import utterance_tokens
from workers.model.tokenizer import ChatMessage, Segment, keep_recent, parse_tool_calls
from workers.repair.repair import deadline, run_repair
from workers.tasks.prefix import after, take_prefix

Emit = Callable[[wire.TurnEvent], None]


def run_turn(
    engine: Engine, session: WorkerSession, request: wire.TurnRequest, emit: Emit
) -> Generator[Yielded, NextLogits, wire.TurnDone]:
    """One turn: prompt, episode and repair if asked, prefill, decode, back into the budget, durable.

    Raises BadMessages, BadSettings, BadEpisode and TurnTooLong before anything has changed, NotComparable also
    afterwards.
    """
    watch = Stopwatch()
    new = [wire_values.to_chat(message) for message in request.messages]
    sampling = wire_values.to_sampling(request.sampling)
    segments = engine.tokenizer.prompt(session.recent, new, session.tools, request.generate)
    prompt = [token for segment in segments for token in segment.token_ids]
    if not prompt:
        raise BadMessages("the turn says nothing: its messages render to no token")
    sampling = _within_limits(engine, session, len(prompt), sampling, request.generate)
    reference = _reference(engine, request)
    episode = (
        read_episode(engine, session, request.episode) if request.HasField("episode") else None
    )
    said = session.length
    pending = list(session.pending)
    session.unsettled = True
    session.forget_turn()
    session.turn_start = session.length
    done = wire.TurnDone(finish_reason="appended", prompt_tokens=len(prompt))
    yield from _recall(engine, session, request, episode, prompt, done, watch)
    there = 0
    if request.HasField("prefix") and reference is None and not request.keep_distribution:
        there = take_prefix(engine, session, request.prefix, prompt)
        done.shared_pages = there // engine.store.layout.page_tokens
        watch.lap("share")
    heard = yield from prefill(
        engine,
        session,
        after(segments, there),
        keep_distribution=request.keep_distribution or reference is not None,
        prompt_said=lambda: watch.lap("prefill"),
    )
    watch.lap("remember" if any(segment.recorded for segment in segments) else "prefill")
    token_ids = prompt
    if request.generate:
        first = NextLogits(heard.logits, int(heard.logits.argmax()))
        answer = yield from decode(session, engine.tokenizer, first, sampling, _shower(emit, watch))
        watch.lap("decode")
        # An answer that was cut off is closed by an end of turn that the model did not say.
        token_ids = [*prompt, *answer.token_ids, *session.pending[1:]]
        done.output_tokens = len(answer.token_ids)
        new.append(_conclude(done, answer, said + len(pending) + len(prompt), emit))
    session.recent = keep_recent([*session.recent, *new])
    session.distribution = heard.distribution if request.keep_distribution else None
    if reference is not None:
        done.fidelity.CopyFrom(_divergence(reference, heard.distribution))
    yield from _settle(engine, session, done, watch)
    _account(done, request, segments, token_ids)
    done.seconds.update(watch.seconds)
    session.unsettled = False
    return done


def _recall(
    engine: Engine,
    session: WorkerSession,
    request: wire.TurnRequest,
    episode: EpisodeRows | None,
    prompt: Sequence[int],
    done: wire.TurnDone,
    watch: Stopwatch,
) -> Generator[Yielded, NextLogits, None]:
    """Before anything is said: the episode's rows, then what the prompt asks for beside them."""
    if episode is not None:
        yield from written(engine, session)
        done.switched.CopyFrom(switch(engine, session, request.episode, episode))
        watch.lap("switch")
    if request.repair and session.repair_rows:
        repaired = yield from run_repair(
            engine, session, prompt, "turn", deadline(request.repair_seconds)
        )
        done.repair.CopyFrom(repaired)
        watch.lap("repair")


def _within_limits(
    engine: Engine, session: WorkerSession, prompt: int, sampling: SamplingSettings, generate: bool
) -> SamplingSettings:
    """The sampling with max_tokens cut to what the context leaves. Raises TurnTooLong when it leaves none."""
    limit = engine.model.max_context
    what = "the model's context"
    if not session.method.evicts and engine.bound(session)[0] < limit:
        limit = engine.bound(session)[0]
        what = "a slot, which the method full never leaves"
    said = session.length + len(session.pending)
    room = limit - said - prompt
    if room < (1 if generate else 0):
        raise TurnTooLong(
            f"the turn has {prompt} tokens after {said}; {what} ends at {limit}. Say less, or open a new session"
        )
    return sampling if sampling.max_tokens <= room else sampling.limited_to(room)


def _shower(emit: Emit, watch: Stopwatch) -> Callable[[int, str], None]:
    def show(token: int, text: str) -> None:
        if "first_token" not in watch.seconds:
            watch.lap("first_token")
        emit(wire.TurnEvent(token=wire.TokenChunk(ids=[token], text=text)))

    return show


def _conclude(done: wire.TurnDone, answer: Answer, position: int, emit: Emit) -> ChatMessage:
    """Fill in the assistant's message and announce its tool calls; returns the message for the next rendering."""
    text, calls = parse_tool_calls(answer.text)
    # The position makes an id unique in its session, and the same whenever the turn is run again.
    announced = [
        wire.ToolCall(id=f"call_{position}_{i}", name=call.name, arguments=call.arguments)
        for i, call in enumerate(calls)
    ]
    done.finish_reason = "tool_calls" if calls else answer.finish_reason
    done.message.CopyFrom(wire.Message(role="assistant", content=text, tool_calls=announced))
    for call in announced:
        emit(wire.TurnEvent(tool_call=call))
    return wire_values.to_chat(done.message)


def _account(
    done: wire.TurnDone,
    request: wire.TurnRequest,
    segments: Sequence[Segment],
    token_ids: Sequence[int],
) -> None:
    """What the turn appended, and how much of it each side said."""
    done.token_ids.extend(token_ids)
    answered = len(token_ids) - done.prompt_tokens if request.generate else None
    done.utterance_tokens.extend(
        utterance_tokens([m.role for m in request.messages], segments, answered)
    )


def _settle(
    engine: Engine, session: WorkerSession, done: wire.TurnDone, watch: Stopwatch
) -> Generator[Yielded, Any, None]:
    """After the last token: back into the budget, every row durable, the state as it is to be committed."""
    engine.cache.clear_promoted(_slot(session))
    session.promoted_rows = 0
    engine.evict(session, turn_over=True)
    session.forget_turn()
    watch.lap("evict")
    yield engine.storing.flush(session)
    done.durable = engine.storing.settle(session)
    watch.lap("flush")
    done.memory.CopyFrom(engine.memory(session))
    done.state.CopyFrom(engine.snapshot(session))


def _slot(session: WorkerSession) -> int:
    assert session.slot is not None, "the scheduler seats a session before it runs"
    return session.slot


def _reference(engine: Engine, request: wire.TurnRequest) -> Distribution | None:
    if not request.compare_with:
        return None
    kept = engine.session(request.compare_with).distribution
    if kept is None:
        raise NotComparable(f"session {request.compare_with} kept no distribution in its last turn")
    return kept


def _divergence(reference: Distribution, heard: Distribution | None) -> wire.Fidelity:
    """Mean KL(reference || heard) in nats and top-1 agreement, token by token."""
    if heard is None or heard.token_ids != reference.token_ids:
        raise NotComparable("the two sessions did not hear the same recorded tokens in this turn")
    divergence = (reference.log_probs.exp() * (reference.log_probs - heard.log_probs)).sum(-1)
    agree = reference.log_probs.argmax(-1) == heard.log_probs.argmax(-1)
    return wire.Fidelity(
        tokens=len(heard.token_ids),
        kl_mean=max(0.0, float(divergence.mean())),
        top1_agreement=float(agree.float().mean()),
    )
