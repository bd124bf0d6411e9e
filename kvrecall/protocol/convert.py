"""Conversion between domain values and the wire's messages: the only place where both meet."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from kvrecall.domain.answer.constraints import FREE, Constraint, ToolChoice
from kvrecall.domain.answer.sampling_defaults import SamplingDefaults
from kvrecall.domain.episodes import ActiveEpisode, EpisodeSegment
from kvrecall.domain.messages import Message, Sampling, TokenLogprob, ToolCall
from kvrecall.domain.reports import (
    EpisodeReport,
    Fidelity,
    MemoryReport,
    PrefillReport,
    RememberedReport,
    RepairReport,
    ReselectionReport,
    RetrievalReport,
)
from kvrecall.domain.rewrites.rewrite import Edit, Rewrite
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.repair import RepairRule
from kvrecall.domain.settings.session import WorkerOptions
from kvrecall.domain.worker_info import ENDLESS, LayerKind, MethodInfo, WorkerInfo
from kvrecall.protocol.v1 import worker_pb2 as pb

_WORKER_OPTIONS = TypeAdapter(WorkerOptions)
_REPAIR_SETTINGS = TypeAdapter(RepairRule)


def message_to_wire(message: Message) -> pb.Message:
    """Convert a message for a worker."""
    return pb.Message(
        role=message.role,
        content=message.content,
        tool_calls=[call_to_wire(call) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def message_from_wire(message: pb.Message) -> Message:
    """Convert a worker's message."""
    return Message(
        role=message.role,
        content=message.content,
        tool_calls=tuple(call_from_wire(call) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def call_to_wire(call: ToolCall) -> pb.ToolCall:
    """Convert a tool call for a worker."""
    return pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def call_from_wire(call: pb.ToolCall) -> ToolCall:
    """Convert a tool call that a worker parsed."""
    return ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def sampling_to_wire(sampling: Sampling) -> pb.Sampling:
    """Convert sampling parameters for a worker."""
    constraint = None
    if sampling.constraint != FREE:
        constraint = pb.Constraint(
            schema=sampling.constraint.schema,
            strict=sampling.constraint.strict,
            tool_choice=sampling.constraint.tool_choice,
            tools=sampling.constraint.tools,
            single_call=sampling.constraint.single_call,
            grammar=sampling.constraint.grammar,
        )
    repetition = sampling.repetition_penalty
    return pb.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=0.0 if sampling.top_p == Sampling.top_p else sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=sampling.stop,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=0.0 if repetition == Sampling.repetition_penalty else repetition,
        min_p=sampling.min_p,
        logit_bias=[pb.TokenBias(id=id, bias=bias) for id, bias in sampling.logit_bias],
        top_logprobs=sampling.top_logprobs,
        constraint=constraint,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        prompt_logprobs=sampling.prompt_logprobs,
    )


def sampling_from_wire(sampling: pb.Sampling) -> Sampling:
    """The sampling parameters of a turn; 0 for max_tokens, top_p or repetition_penalty: not set."""
    constraint = sampling.constraint
    return Sampling(
        max_tokens=sampling.max_tokens or Sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or Sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=tuple(sampling.stop),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty or Sampling.repetition_penalty,
        min_p=sampling.min_p,
        logit_bias=tuple((each.id, each.bias) for each in sampling.logit_bias),
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
        constraint=Constraint(
            constraint.schema,
            constraint.strict,
            ToolChoice(constraint.tool_choice or ToolChoice.AUTO),
            tuple(constraint.tools),
            constraint.single_call,
            constraint.grammar,
        ),
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
    )


def logprob_from_wire(logprob: pb.TokenLogprob) -> TokenLogprob:
    """Convert the log-probability of one token."""
    top = tuple(logprob_from_wire(each) for each in logprob.top)
    return TokenLogprob(logprob.token, logprob.utf8, logprob.logprob, top)


def to_chat(message: pb.Message) -> dict[str, Any]:
    """The message in the form of Hugging Face chat templates."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    if message.name:
        chat["name"] = message.name
    if message.reasoning:
        chat["reasoning"] = message.reasoning
    return chat


def chat_to_wire(chat: dict[str, Any]) -> pb.Message:
    """The inverse of `to_chat`."""
    calls = [
        pb.ToolCall(
            id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"]
        )
        for call in chat.get("tool_calls", [])
    ]
    return pb.Message(
        role=chat["role"],
        content=chat.get("content") or "",
        tool_calls=calls,
        tool_call_id=chat.get("tool_call_id", ""),
        name=chat.get("name", ""),
        reasoning=chat.get("reasoning", ""),
    )


def active_episode_from_wire(
    episode: str, patched_prompt: Sequence[int], segments: Iterable[pb.Span]
) -> ActiveEpisode:
    """The episode of a session's state, or one that a turn makes active."""
    return ActiveEpisode(episode, tuple(patched_prompt), segments_from_wire(segments))


def segments_from_wire(segments: Iterable[pb.Span]) -> tuple[EpisodeSegment, ...]:
    """An episode's segments with their similarity."""
    return tuple(EpisodeSegment(each.start, each.stop, each.similarity) for each in segments)


def segments_to_wire(segments: Iterable[EpisodeSegment]) -> list[pb.Span]:
    """The inverse of `segments_from_wire`."""
    return [
        pb.Span(start=each.start, stop=each.stop, similarity=each.similarity) for each in segments
    ]


def session_spec_to_wire(
    session: Session, epoch: int, weight: float, row_key: bytes, page_key: bytes = b""
) -> pb.SessionSpec:
    """The session's settings as a worker reads them, under `epoch`.

    `weight`: its tenant's. `row_key` and `page_key`: of `kvrecall.domain.page_ids`.
    """
    settings = session.settings
    return pb.SessionSpec(
        session=session.id,
        epoch=epoch,
        budget=settings.budget or 0,
        repair_rows=settings.repair_rows,
        method=settings.method,
        method_settings=json.dumps(dict(settings.method_settings)),
        seed=settings.seed,
        tools=settings.tools,
        layer_budgets=settings.layer_budgets or "",
        repair_settings=_dump_repair(settings.repair_settings),
        options=_WORKER_OPTIONS.dump_json(settings.worker_options).decode(),
        tenant=settings.tenant,
        weight=weight,
        row_key=row_key,
        page_key=page_key,
    )


def _dump_repair(settings: RepairRule | None) -> str:
    return "" if settings is None else _REPAIR_SETTINGS.dump_json(settings).decode()


def worker_options_from_wire(spec: pb.SessionSpec) -> WorkerOptions:
    """Parse the options that act in the worker; defaults when the spec has none.

    Raises pydantic.ValidationError.
    """
    return _WORKER_OPTIONS.validate_json(spec.options) if spec.options else WorkerOptions()


def repair_from_wire(report: pb.RepairReport, in_pause: bool = False) -> RepairReport:
    """Convert a worker's report of one repair."""
    return RepairReport(
        trigger=report.trigger,
        signal_tokens=report.signal_tokens,
        scored_rows=report.scored_rows,
        promoted=len(report.promoted),
        seconds=report.seconds,
        candidates=report.candidates,
        demoted=report.demoted_rows,
        truncated=report.truncated,
        bytes_read=report.bytes_read,
        observed_tokens=report.observed_tokens,
        in_pause=in_pause,
    )


def prefill_from_wire(done: pb.TurnDone) -> PrefillReport | None:
    """Convert the report of a turn's sparse blocks; None if it had none."""
    if not done.HasField("prefill"):
        return None
    report = done.prefill
    return PrefillReport(report.blocks, report.cover_min, report.cover_mean, report.density)


def episode_from_wire(episode: str, similarity: float, done: pb.TurnDone) -> EpisodeReport:
    """Build the report of a turn that matched `episode`."""
    if not done.HasField("switched"):
        return EpisodeReport(episode, similarity)
    moved = done.switched
    return EpisodeReport(
        episode,
        similarity,
        True,
        moved.rows_moved,
        moved.rows_kept,
        moved.bytes_moved,
        moved.seconds,
    )


def reselections_from_wire(done: pb.TurnDone) -> ReselectionReport | None:
    """Convert the report of an answer's re-selections; None without one."""
    if not done.HasField("reselections"):
        return None
    report = done.reselections
    return ReselectionReport(report.count, report.rows_in, report.rows_out, report.seconds)


def remembered_from_wire(done: pb.TurnDone, sessions: tuple[str, ...]) -> RememberedReport | None:
    """Convert the report of what a turn remembered of these sessions; None if it was given nothing."""
    if not done.HasField("remembered"):
        return None
    own = done.remembered
    return RememberedReport(own.passages, own.tokens, own.prefilled_tokens, own.behind, sessions)


def retrieval_from_wire(done: pb.TurnDone) -> RetrievalReport | None:
    """Convert the report of a turn's retrieval; None if no step retrieved."""
    if not done.HasField("retrieval"):
        return None
    report = done.retrieval
    return RetrievalReport(report.steps, report.rows, report.seconds, report.refused)


def memory_from_wire(report: pb.MemoryReport, durable: bool | None = None) -> MemoryReport:
    """Convert a worker's report of a session's memory; it does not say whether rows are durable."""
    return MemoryReport(
        length=report.length + report.unsettled,
        budget=report.budget,
        active_rows=_largest(report.active_rows),
        peak_rows=_largest(report.peak_rows),
        bound_rows=_largest(report.bound_rows),
        active_bytes=report.active_bytes,
        evicted_rows=report.evicted_rows,
        promoted_rows=report.promoted_rows,
        layer_active_rows=tuple(report.active_rows),
        layer_peak_rows=tuple(report.peak_rows),
        layer_bound_rows=tuple(report.bound_rows),
        tier_bytes=dict(report.tier_bytes),
        in_slot=report.in_slot,
        retrieval_bytes=report.retrieval_bytes,
        durable=durable,
        unsettled=report.unsettled,
        dropped_tokens=report.dropped_tokens,
    )


def rewrite_from_wire(report: pb.TurnDone | pb.LoggedTurn) -> Rewrite | None:
    """Convert what a turn rewrote; None for nothing."""
    if not report.HasField("rewrite"):
        return None
    edits = (Edit(e.start, e.stop, tuple(e.token_ids)) for e in report.rewrite.edits)
    return Rewrite(report.rewrite.kept, report.rewrite.rows, tuple(edits))


def rewrite_to_wire(rewrite: Rewrite) -> pb.Rewrite:
    """Convert what a turn rewrote for a worker, or for a gateway."""
    edits = [pb.Edit(start=e.start, stop=e.stop, token_ids=e.token_ids) for e in rewrite.edits]
    return pb.Rewrite(kept=rewrite.kept, rows=rewrite.rows, edits=edits)


def fidelity_from_wire(done: pb.TurnDone) -> Fidelity | None:
    """Convert the divergence that the turn asked for; None if it asked for none."""
    if not done.HasField("fidelity"):
        return None
    return Fidelity(done.fidelity.tokens, done.fidelity.kl_mean, done.fidelity.top1_agreement)


def worker_info_from_wire(info: pb.WorkerInfo) -> WorkerInfo:
    """Convert a worker's description."""
    return WorkerInfo(
        model=info.model,
        fingerprint=info.fingerprint,
        layers=info.layers,
        kv_heads=info.kv_heads,
        head_dim=info.head_dim,
        slots=info.slots,
        min_budget=info.min_budget,
        max_budget=info.max_budget,
        block_tokens=info.block_tokens,
        max_context=info.max_context,
        page_tokens=info.page_tokens,
        token_bytes=info.token_bytes,
        methods=tuple(method_info_from_wire(method) for method in info.methods),
        repair=method_info_from_wire(info.repair) if info.HasField("repair") else None,
        call_format=info.call_format,
        prefill=method_info_from_wire(info.prefill) if info.HasField("prefill") else None,
        retrieve=method_info_from_wire(info.retrieve) if info.HasField("retrieve") else None,
        sampling=_sampling_defaults_from_wire(info.sampling),
        layer_kinds=tuple(
            LayerKind(kind.name, kind.layers, kind.token_bytes, kind.state_bytes)
            for kind in info.layer_kinds
        ),
        rewrites=info.rewrites,
        max_session_tokens=_read_session_limit(info),
        template_variables=tuple(info.template_variables),
    )


def _read_session_limit(info: pb.WorkerInfo) -> int | None:
    """Read where sessions with recall end; None: nowhere."""
    limit = info.max_session_tokens or info.max_context
    return None if limit >= ENDLESS else limit


def sampling_defaults_to_wire(sampling: SamplingDefaults) -> pb.SamplingDefaults:
    """Convert a model's sampling parameters for a gateway."""
    return pb.SamplingDefaults(**asdict(sampling))


def _sampling_defaults_from_wire(sampling: pb.SamplingDefaults) -> SamplingDefaults:
    return SamplingDefaults(
        temperature=sampling.temperature,
        top_p=sampling.top_p or SamplingDefaults.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty or SamplingDefaults.repetition_penalty,
    )


def method_info_from_wire(method: pb.MethodInfo) -> MethodInfo:
    """Convert the description of an eviction method, or of repair, prefill or retrieval."""
    return MethodInfo(
        method.name,
        method.summary,
        method.settings_schema,
        method.episodes,
        method.retrieves,
    )


def _largest(rows: Iterable[int]) -> int:
    return max(rows, default=0)
