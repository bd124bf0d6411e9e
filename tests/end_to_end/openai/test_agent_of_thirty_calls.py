"""An agent of thirty tool calls through OpenAI's client: that of the session API, nothing twice."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pytest
from openai import OpenAI

Json = dict[str, Any]
CALLS = 30
PAGE = 64
# More than a call or a sentence has.
CALL_TOKENS = 200
ANSWER_TOKENS = 12
SETTINGS: Json = {
    "budget": 128,
    "research": {"method": "snapkv", "repair_rows": 32, "repair_on": ["tool_call", "tool_result"]},
    "seed": 7,
}
# Sampled, so that equal answers mean equal seeds as well.
TEMPERATURE = 2.0
REQUIRED: Json = {"tool_choice": "required", "parallel_tool_calls": False}
FUNCTION: Json = {
    "name": "look_up",
    "description": "Look up the number of somebody's thing.",
    "parameters": {
        "type": "object",
        "properties": {
            "name": {"enum": ["Ada", "Ben", "Clara", "David", "Emma", "Frank"]},
            "thing": {"enum": ["locker", "garage", "office", "garden"]},
        },
        "required": ["name", "thing"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION}]
# Members of a repair that differ between runs.
MEASURED = ("at", "seconds", "in_pause", "bytes_read", "started_at", "call_id")
# The worker's own count of tokens.
COMPUTED = "kvrecall_worker_prefilled_tokens_total"


@dataclass(frozen=True)
class Answer:
    """An answer in the form that all APIs have in common, and the tokens that were computed for it.

    `said` is the arguments of a call, or a text. `held` tokens were not computed, as
    far as the API tells.
    """

    session: str
    call: str
    said: Json | str
    output: int
    computed: int
    held: int | None = None


@dataclass(frozen=True)
class Trace:
    """What an agent said, what was computed for each answer, and what its session holds in the end.

    `computed` is but for whole pages, which the pause before the answer may have settled.
    """

    said: tuple[Json | str, ...]
    output: tuple[int, ...]
    computed: tuple[int, ...]
    rows: tuple[int, int, int]
    repairs: tuple[Json, ...]


# From the message that is new, and the options of the request, to the answer.
Ask = Callable[[Json, Json], Answer]


def look_up(number: int, asked: Json) -> str:
    return f"{asked['name']}'s {asked['thing']} has number {1000 + 37 * number}."


def ask_first(say: Any) -> Json:
    question: Json = say.user(say.chatter(90, 40))
    return question


def run_agent(server: Any, say: Any, ask: Ask) -> Trace:
    """Run the agent; each result is sent when the repair of its call is done."""
    new = ask_first(say)
    answers = []
    worker_before = server.metric(COMPUTED)
    for number in range(CALLS + 1):
        more = number < CALLS
        options = REQUIRED if more else {"tool_choice": "none"}
        answer = ask(new, options | {"max_tokens": CALL_TOKENS if more else ANSWER_TOKENS})
        answers.append(answer)
        if more:
            await_repair(server, say, answer.session, number + 1)
            assert isinstance(answer.said, dict), "it is a call's arguments"
            result = look_up(number, answer.said)
            new = {"role": "tool", "tool_call_id": answer.call, "content": result}
    session = answer.session
    assert {each.session for each in answers} == {session}
    assert server.own.get_session(session).turns == CALLS + 1
    worker_count = server.metric(COMPUTED) - worker_before
    pages, rest = divmod(worker_count - sum(each.computed for each in answers), PAGE)
    assert 0 <= pages < CALLS
    assert rest == 0, "but for pages that pauses settled"
    memory = server.own.memory(session)
    repairs = [asdict(each) for each in server.own.repairs(session, limit=CALLS + 1)]
    server.own.delete_session(session)
    return Trace(
        tuple(each.said for each in answers),
        tuple(each.output for each in answers),
        tuple(each.computed % PAGE for each in answers),
        (memory.length, memory.active_rows, memory.evicted_rows),
        tuple({key: each[key] for key in each.keys() - set(MEASURED)} for each in repairs),
    )


def await_repair(server: Any, say: Any, session: str, count: int) -> None:
    """Wait until the session's pauses have had `count` repairs."""

    def is_done() -> bool:
        return len(server.own.repairs(session, limit=CALLS + 1)) == count

    say.until(is_done, f"repair {count}")


class SessionAgent:
    """Speaks the session API, whose usage does not tell what was computed: the worker counts it."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._session = server.own.create_session(**SETTINGS, tools=TOOLS).id

    def __call__(self, new: Json, options: Json) -> Answer:
        before = self._server.metric(COMPUTED)
        turn = self._server.own.turn(self._session, [new], temperature=TEMPERATURE, **options)
        computed = int(self._server.metric(COMPUTED) - before)
        call = turn.tool_calls[0] if turn.tool_calls else None
        said = turn.text if call is None else dict(call.arguments)
        id = "" if call is None else call.id
        return Answer(self._session, id, said, turn.usage.output_tokens, computed)


class ChatAgent:
    """Speaks chat completions: it sends the whole conversation with each request."""

    def __init__(self, client: OpenAI, streamed: bool) -> None:
        self._client = client
        self._streamed = streamed
        self._said: list[Any] = []

    def __call__(self, new: Json, options: Json) -> Answer:
        self._said.append(new)
        body: Json = {
            "model": self._client.models.list().data[0].id,
            "messages": self._said,
            "tools": TOOLS,
            "temperature": TEMPERATURE,
            "extra_body": {"kvrecall": SETTINGS},
            **options,
        }
        if self._streamed:
            with self._client.chat.completions.with_streaming_response.create(
                **body, stream=True, stream_options={"include_usage": True}
            ) as raw:
                headers = raw.headers
                message, usage = put_together(raw.parse())
        else:
            response: Any = self._client.chat.completions.with_raw_response.create(**body)
            headers = response.headers
            answer = response.parse()
            message = answer.choices[0].message.model_dump(exclude_none=True)
            usage = answer.usage
        self._said.append(message)
        call = message["tool_calls"][0] if message.get("tool_calls") else None
        function = None if call is None else call["function"]
        said = message["content"] if function is None else json.loads(function["arguments"])
        cached = usage.prompt_tokens_details.cached_tokens
        return Answer(
            headers["kvrecall-session"],
            "" if call is None else call["id"],
            said,
            usage.completion_tokens,
            usage.prompt_tokens - cached,
            cached,
        )


def put_together(chunks: Any) -> tuple[Json, Any]:
    """The message and the usage of a streamed answer, as clients put them together."""
    text, calls, usage = "", list[Json](), None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                if piece.index == len(calls):
                    function = {"name": piece.function.name, "arguments": ""}
                    calls.append({"id": piece.id, "type": "function", "function": function})
                calls[piece.index]["function"]["arguments"] += piece.function.arguments
    said: Json = {"role": "assistant", "content": text.strip()}
    return (said | {"tool_calls": calls} if calls else said), usage


class ResponsesAgent:
    """Speaks responses: it sends what is new after the response before, or all items."""

    def __init__(self, client: OpenAI, chained: bool, streamed: bool) -> None:
        self._client = client
        self._chained = chained
        self._streamed = streamed
        self._said: list[Any] = []
        self._previous: Json = {}

    def __call__(self, new: Json, options: Json) -> Answer:
        item = new
        if new["role"] == "tool":
            item = {
                "type": "function_call_output",
                "call_id": new["tool_call_id"],
                "output": new["content"],
            }
        self._said.append(item)
        options = dict(options)
        body: Json = {
            "model": self._client.models.list().data[0].id,
            "input": [item] if self._chained else self._said,
            "tools": FLAT_TOOLS,
            "temperature": TEMPERATURE,
            "max_output_tokens": options.pop("max_tokens"),
            "extra_body": {"kvrecall": SETTINGS},
            **options,
            **self._previous,
        }
        if self._streamed:
            with self._client.responses.with_streaming_response.create(**body, stream=True) as raw:
                headers = raw.headers
                events: list[Any] = list(raw.parse())
                response = events[-1].response
        else:
            whole: Any = self._client.responses.with_raw_response.create(**body)
            headers, response = whole.headers, whole.parse()
        if self._chained:
            self._previous = {"previous_response_id": response.id}
        self._said += response.output
        calls = [each for each in response.output if each.type == "function_call"]
        cached = response.usage.input_tokens_details.cached_tokens
        return Answer(
            headers["kvrecall-session"],
            calls[0].call_id if calls else "",
            json.loads(calls[0].arguments) if calls else response.output_text,
            response.usage.output_tokens,
            response.usage.input_tokens - cached,
            cached,
        )


@pytest.fixture(scope="module")
def expected(server: Any, say: Any) -> Trace:
    """The agent of the session API, after a session whose pages of the tools all agents share."""
    session = server.own.create_session(**SETTINGS, tools=TOOLS).id
    server.own.turn(session, [ask_first(say)], max_tokens=1)
    return run_agent(server, say, SessionAgent(server))


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(partial(ChatAgent, streamed=False), id="chat"),
        pytest.param(partial(ChatAgent, streamed=True), id="chat streamed"),
        pytest.param(partial(ResponsesAgent, chained=True, streamed=False), id="responses chained"),
        pytest.param(partial(ResponsesAgent, chained=False, streamed=True), id="responses whole"),
    ],
)
def test_an_agent_says_does_and_costs_what_it_would_over_sessions(
    agent: Callable[[OpenAI], Ask], openai: OpenAI, server: Any, say: Any, expected: Trace
) -> None:
    trace = run_agent(server, say, agent(openai))
    assert trace == expected
    assert len(trace.repairs) == CALLS
    assert len({str(each) for each in trace.said}) > 3, "a sampled agent asks for different things"
