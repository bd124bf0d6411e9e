"""Answers of a model, as a worker tells of them: with reasoning, text, calls and their ends."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from kvrecall.protocol.v1 import worker_pb2 as pb

# A custom tool's name; that of the function is "f".
CUSTOM = "t"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOKEN = pb.TokenLogprob(
    token="ok",
    utf8=b"ok",
    logprob=-0.5,
    top=[
        pb.TokenLogprob(token="ok", utf8=b"ok", logprob=-0.5),
        pb.TokenLogprob(token="�", utf8=b"\xf0", logprob=-1.25),
    ],
)


@dataclass(frozen=True)
class Answer:
    """An answer; the pieces of its texts and arguments have four characters.

    - `calls`: the arguments of calls of a function; `inputs`: the texts of calls of a custom tool,
      which follow.
    - `form`: of its text, `json_schema` with `SCHEMA` or `json_object`; empty if none is asked for.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[str, ...] = ()
    finish: str = "stop"
    stop: str = ""
    logprobs: bool = False
    inputs: tuple[str, ...] = ()
    form: str = ""

    @property
    def message(self) -> pb.Message:
        """The message as the session keeps it."""
        return pb.Message(
            role="assistant",
            content=self.text.rstrip(),
            reasoning=self.reasoning,
            tool_calls=self._build_calls(),
        )

    def events(self) -> Iterator[pb.TurnEvent]:
        """Yield the events of its generation; the first token is one without text."""
        yield pb.TurnEvent(token=pb.TokenChunk(ids=[0]))
        for piece in _cut(self.reasoning):
            yield pb.TurnEvent(token=pb.TokenChunk(ids=[1], reasoning=piece))
        for piece in _cut(self.text):
            logprobs = [TOKEN] if self.logprobs else []
            yield pb.TurnEvent(token=pb.TokenChunk(ids=[2], text=piece, logprobs=logprobs))
        for index, call in enumerate(self._build_calls()):
            for piece in _cut(call.arguments):
                yield pb.TurnEvent(token=pb.TokenChunk(ids=[3]))
                delta = pb.ArgumentsDelta(index=index, id=call.id, name=call.name, arguments=piece)
                yield pb.TurnEvent(arguments=delta)
            yield pb.TurnEvent(tool_call=call)

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return sum(event.HasField("token") for event in self.events())

    def _build_calls(self) -> list[pb.ToolCall]:
        """Build the calls; one of a custom tool that was cut lacks the end of its arguments."""
        made = [("f", arguments) for arguments in self.calls]
        made += [(CUSTOM, json.dumps({"input": text}, ensure_ascii=False)) for text in self.inputs]
        if self.inputs and self.finish == "length":
            made[-1] = (CUSTOM, made[-1][1].removesuffix('"}'))
        return [
            pb.ToolCall(id=f"call_9_{index}", name=name, arguments=arguments)
            for index, (name, arguments) in enumerate(made)
        ]


ANSWERS: dict[str, Answer] = {
    "plain": Answer("It rains in Bern."),
    "empty": Answer(""),
    "spaces": Answer("\n\nIt rains.  \n"),
    "unicode": Answer("käse 🧀 日本語"),
    "reasoning": Answer("Four.", reasoning="Two and two."),
    "reasoning alone": Answer(reasoning="Two and", finish="length"),
    "logprobs": Answer("It rains.", logprobs=True),
    "length": Answer("It rains in", finish="length"),
    "stop": Answer("It rains ", finish="stop", stop="in"),
    "call": Answer(calls=('{"city": "Bern"}',), finish="tool_calls"),
    "call after text": Answer("Let me look.\n", calls=('{"n": 1}',), finish="tool_calls"),
    "call after reasoning": Answer(
        reasoning="I look.", calls=('{"n": {"a": [1, "}"]}}',), finish="tool_calls"
    ),
    "parallel calls": Answer(
        "Both.", calls=('{"city": "Bern"}', "{}", '{"city": "Zürich 🧀"}'), finish="tool_calls"
    ),
    "cut call": Answer(calls=('{"n": 1}', '{"city": "Be'), finish="length"),
    "schema": Answer('{"city": "Zürich 🧀"}', form="json_schema"),
    "cut schema": Answer('{"city": "Be', finish="length", form="json_schema"),
}
# Answers to requests that Anthropic's API does not have.
OPENAIS: dict[str, Answer] = ANSWERS | {
    "object": Answer('{"n": [1, {}]}', form="json_object"),
    "custom call": Answer(inputs=('a "b"\n\\ 🧀',), finish="tool_calls"),
    "custom call without text": Answer(inputs=("",), finish="tool_calls"),
    "calls of both": Answer("Both.", calls=('{"n": 1}',), inputs=("a", "b\n"), finish="tool_calls"),
    "cut custom call": Answer(inputs=("a", "select 1"), finish="length"),
}


def answer_with(worker: Any, answer: Answer) -> None:
    """Let the worker's answers be this one."""
    worker_turn = type(worker).turn

    async def turn(request: pb.TurnRequest) -> AsyncIterator[pb.TurnEvent]:
        async for event in worker_turn(worker, request):
            if event.HasField("planned"):
                yield event
            if not event.HasField("done"):
                continue
            for each in answer.events():
                yield each
            done = event.done
            done.message.CopyFrom(answer.message)
            done.finish_reason, done.stop_sequence = answer.finish, answer.stop
            done.output_tokens = answer.tokens
            done.memory.length = done.prompt_tokens + answer.tokens - 1  # the last has no row yet
            done.reasoning_tokens = len(list(_cut(answer.reasoning)))
            yield event

    worker.turn = turn


def _cut(text: str) -> Iterator[str]:
    return (text[start : start + 4] for start in range(0, len(text), 4))
