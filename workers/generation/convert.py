"""Chat messages and segments, on the wire and in the worker's own form."""

from collections.abc import Iterable

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.engine.session import NearSegment
from workers.generation.sampling import SamplingSettings
from workers.model.tokenizer import ChatMessage


def to_chat(message: wire.Message) -> ChatMessage:
    """From the wire."""
    chat: ChatMessage = {"role": message.role, "content": message.content}
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
    return chat


def to_wire(chat: ChatMessage) -> wire.Message:
    """To the wire."""
    calls = [
        wire.ToolCall(
            id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"]
        )
        for call in chat.get("tool_calls", [])
    ]
    return wire.Message(
        role=chat["role"],
        content=chat.get("content") or "",
        tool_calls=calls,
        tool_call_id=chat.get("tool_call_id", ""),
        name=chat.get("name", ""),
    )


def to_sampling(sampling: wire.Sampling) -> SamplingSettings:
    """From the wire, where 0 stands for what was not set. Raises BadSettings."""
    return SamplingSettings(
        max_tokens=sampling.max_tokens or SamplingSettings.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p or 1.0,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=tuple(sampling.stop),
    )


def to_near(spans: Iterable[wire.Span]) -> tuple[NearSegment, ...]:
    """Segments from the wire."""
    return tuple(NearSegment(span.start, span.stop, span.nearness) for span in spans)


def to_spans(segments: Iterable[NearSegment]) -> list[wire.Span]:
    """Segments to the wire."""
    return [
        wire.Span(start=each.start, stop=each.stop, nearness=each.nearness) for each in segments
    ]
