"""Errors of each API are what its vendor's client raises, before a stream and within."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import anthropic as anthropics
import openai as openais
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import BetaErrorResponse, ErrorResponse
from anthropic.types.thread_not_found_error import ThreadNotFoundError
from openai import AsyncOpenAI
from openai.types.responses import ResponseFailedEvent
from openai.types.shared import ErrorObject

from kvrecall.domain.errors import WorkerLost
from services.access.authenticator import AccessPolicy
from services.access.settings import AccessSettings
from tests.gateway.vendors.vendor_types import Json, check

Ask = Callable[..., Awaitable[Any]]
HELLO: list[Any] = [{"role": "user", "content": "hello there"}]
LONG = "word " * 40
TOO_LARGE = "x" * 20_000
DOORS = pytest.mark.parametrize("door", ["chat", "completions", "responses"])
STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def ask(api: Any, openai: AsyncOpenAI) -> Ask:
    """ask(door, text, **members): a request for an answer at one of OpenAI's doors."""

    async def send(door: str, text: str = "hello there", **members: Any) -> Any:
        model = {"model": api.service.info.model}
        messages: list[Any] = [{"role": "user", "content": text}]
        match door:
            case "chat":
                given = {"messages": messages, **model, **members}
                return await openai.chat.completions.create(**given)
            case "completions":
                return await openai.completions.create(**{"prompt": text, **model, **members})
            case _:
                return await openai.responses.create(**{"input": text, **model, **members})

    return send


async def catch(asked: Awaitable[Any], kind: type[openais.APIStatusError]) -> Any:
    """Return the error that OpenAI's client raises, whose body has the members of its type alone."""
    with pytest.raises(kind) as caught:
        await asked
    body = caught.value.response.json()
    assert body.keys() == {"error"}
    check(ErrorObject, body["error"])
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["message"] in caught.value.message
    assert caught.value.request_id
    return caught.value


async def collect(stream: AsyncIterator[Any], found: list[Any]) -> None:
    """Read a stream to its end, or to the error that it raises."""
    async for each in stream:
        found.append(each)


def describe(error: Any) -> tuple[str, str | None, str | None]:
    return error.type, error.code, error.param


@DOORS
@STREAM
async def test_a_member_that_is_wrong_is_a_bad_request_by_its_name(
    ask: Ask, door: str, stream: bool
) -> None:
    asked = ask(door, temperature=3, stream=stream)
    error = await catch(asked, openais.BadRequestError)
    assert describe(error) == ("invalid_request_error", "invalid_value", "temperature")


@DOORS
@STREAM
async def test_a_member_that_cannot_be_honoured_is_a_bad_request_by_its_name(
    ask: Ask, door: str, stream: bool
) -> None:
    asked = ask(door, stream=stream, extra_body={"moderation": {"model": "m"}})
    error = await catch(asked, openais.BadRequestError)
    assert describe(error) == ("invalid_request_error", "unsupported_parameter", "moderation")


@DOORS
@STREAM
async def test_an_unknown_model_is_not_found(ask: Ask, door: str, stream: bool) -> None:
    error = await catch(ask(door, model="gpt-9", stream=stream), openais.NotFoundError)
    assert describe(error) == ("invalid_request_error", "model_not_found", "model")


@DOORS
async def test_a_body_over_the_limit_is_a_status_error(ask: Ask, door: str) -> None:
    error = await catch(ask(door, TOO_LARGE), openais.APIStatusError)
    assert error.status_code == 413
    assert describe(error) == ("invalid_request_error", "request_too_large", "body")


@DOORS
@STREAM
async def test_a_conversation_over_the_context_is_told_in_the_words_that_clients_know(
    api: Any, ask: Ask, door: str, stream: bool
) -> None:
    api.worker.context = 20
    if door == "completions":  # whose tokens the gateway counts
        api.service._info = replace(api.service.info, max_context=21, max_session_tokens=21)
    if door == "responses" and stream:
        events = [event async for event in await ask(door, LONG, stream=True)]
        kinds = [event.type for event in events]
        assert kinds == ["response.created", "response.in_progress", "response.failed"]
        failed = events[-1].response
        check(ResponseFailedEvent, events[-1].model_dump(exclude_unset=True, by_alias=True))
        assert (failed.status, failed.error.code) == ("failed", "context_length_exceeded")
        assert "maximum context length is 20 tokens" in failed.error.message
        return
    error = await catch(ask(door, LONG, stream=stream), openais.BadRequestError)
    param = {"chat": "messages", "completions": "prompt", "responses": "input"}[door]
    assert describe(error) == ("invalid_request_error", "context_length_exceeded", param)
    assert "maximum context length is 20 tokens" in error.message


@DOORS
async def test_a_failure_before_an_answer_is_a_server_error(api: Any, ask: Ask, door: str) -> None:
    api.worker.faults["done"] = WorkerLost("gone")
    error = await catch(ask(door), openais.InternalServerError)
    assert describe(error) == ("server_error", "worker_lost", None)


@pytest.mark.parametrize("door", ["chat", "completions"])
async def test_a_failure_within_a_stream_is_raised_behind_its_pieces(
    api: Any, ask: Ask, door: str
) -> None:
    api.worker.faults["done"] = WorkerLost("gone")
    pieces: list[Any] = []
    with pytest.raises(openais.APIError) as caught:
        await collect(await ask(door, stream=True), pieces)
    assert pieces
    check(ErrorObject, caught.value.body)
    assert describe(caught.value) == ("server_error", "worker_lost", None)
    assert caught.value.message == "gone"


UNKNOWN: dict[str, tuple[Callable[[AsyncOpenAI], Awaitable[Any]], str, str | None]] = {
    "model": (lambda client: client.models.retrieve("gpt-9"), "model_not_found", "model"),
    "response": (
        lambda client: client.responses.retrieve("resp_a_1"),
        "response_not_found",
        None,
    ),
    "deleted response": (
        lambda client: client.responses.delete("resp_a_1"),
        "response_not_found",
        None,
    ),
    "cancelled response": (
        lambda client: client.responses.cancel("resp_a_1"),
        "response_not_found",
        None,
    ),
    "items of a response": (
        lambda client: client.responses.input_items.list("resp_a_1")._get_page(),
        "response_not_found",
        None,
    ),
    "conversation": (
        lambda client: client.conversations.retrieve("conv_a"),
        "conversation_not_found",
        None,
    ),
    "item": (
        lambda client: client.conversations.items.retrieve("msg_a", conversation_id="conv_a"),
        "conversation_not_found",
        None,
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
async def test_what_an_id_does_not_name_is_not_found(openai: AsyncOpenAI, name: str) -> None:
    call, code, param = UNKNOWN[name]
    error = await catch(call(openai), openais.NotFoundError)
    assert describe(error) == ("invalid_request_error", code, param)


@STREAM
async def test_what_a_response_does_not_follow_is_told_by_the_member(
    ask: Ask, stream: bool
) -> None:
    asked = ask("responses", previous_response_id="resp_a_1", stream=stream)
    error = await catch(asked, openais.BadRequestError)
    wanted = ("invalid_request_error", "previous_response_not_found", "previous_response_id")
    assert describe(error) == wanted
    asked = ask("responses", conversation="conv_a", stream=stream)
    error = await catch(asked, openais.NotFoundError)
    assert describe(error)[:2] == ("invalid_request_error", "conversation_not_found")


@pytest.fixture
def say(served: Any, anthropic: AsyncAnthropic) -> Ask:
    """say(text, **members): a request for a message."""

    async def send(text: str = "hello there", **members: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": text}]
        asked = {"model": served.service.info.model, "max_tokens": 9, "messages": messages}
        return await anthropic.messages.create(**{**asked, **members})

    return send


async def catch_anthropics(
    asked: Awaitable[Any], kind: type[anthropics.APIStatusError], type: str
) -> Any:
    """Return the error that Anthropic's client raises, whose body is one of its types."""
    with pytest.raises(kind) as caught:
        await asked
    body = caught.value.response.json()
    if type != "request_too_large":  # which the service sends, and no type of the client's has
        check(BetaErrorResponse, body)
        assert check(ErrorResponse, body).request_id == caught.value.request_id
    assert (body["error"]["type"], caught.value.type) == (type, type)
    assert body["error"]["message"] == caught.value.api_message != ""
    return caught.value


@STREAM
@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"extra_body": {"temperature": 3}}, "temperature: "),
        ({"messages": []}, "messages: "),
        ({"extra_body": {"output_config": {"format": {"type": "xml"}}}}, "output_config.format"),
        ({"tools": [{"type": "robot_20250101", "name": "r"}]}, "tools[0].type: "),
    ],
)
async def test_what_is_wrong_in_a_message_is_anthropics_bad_request(
    say: Ask, members: Json, message: str, stream: bool
) -> None:
    asked = say(stream=stream, **members)
    error = await catch_anthropics(asked, anthropics.BadRequestError, "invalid_request_error")
    assert error.api_message.startswith(message)


@STREAM
async def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(
    served: Any, say: Ask, stream: bool
) -> None:
    served.worker.context = 20
    asked = say(LONG, stream=stream)
    error = await catch_anthropics(asked, anthropics.BadRequestError, "invalid_request_error")
    assert error.api_message == "prompt is too long: 41 tokens > 20 maximum"


@STREAM
async def test_anthropics_client_finds_no_unknown_model(say: Ask, stream: bool) -> None:
    asked = say(model="claude-9", stream=stream)
    await catch_anthropics(asked, anthropics.NotFoundError, "not_found_error")


async def test_a_message_over_the_limit_of_bodies_is_too_large(say: Ask) -> None:
    kind = anthropics.RequestTooLargeError
    await catch_anthropics(say(TOO_LARGE), kind, "request_too_large")


async def test_a_thread_that_is_not_there_is_anthropics_error_of_it(
    served: Any, anthropic: AsyncAnthropic
) -> None:
    thread: Any = {"type": "continue", "previous_message_id": "msg_a"}
    asked = anthropic.beta.messages.create(
        model=served.service.info.model, max_tokens=9, messages=HELLO, thread=thread
    )
    with pytest.raises(ThreadNotFoundError) as caught:
        await asked
    assert caught.value.error_code == "thread_not_found"


async def test_a_failure_before_a_message_is_an_overload(served: Any, say: Ask) -> None:
    served.worker.faults["done"] = WorkerLost("gone")
    await catch_anthropics(say(), anthropics.APIStatusError, "overloaded_error")


async def test_a_failure_within_the_stream_of_a_message_is_raised_behind_its_events(
    served: Any, say: Ask
) -> None:
    served.worker.faults["done"] = WorkerLost("gone")
    events: list[Any] = []
    with pytest.raises(anthropics.APIStatusError) as caught:
        await collect(await say(stream=True), events)
    assert events[0].type == "message_start"
    check(ErrorResponse, caught.value.body)
    assert (caught.value.type, caught.value.api_message) == ("overloaded_error", "gone")


class TestWithoutAKey:
    """A service whose keys nobody has."""

    @pytest.fixture
    def access_policy(self) -> AccessPolicy:
        return AccessPolicy(open=False, pepper=b"0123456789abcdef")

    @DOORS
    @STREAM
    async def test_a_wrong_key_is_openais_error_of_it(
        self, ask: Ask, door: str, stream: bool
    ) -> None:
        error = await catch(ask(door, stream=stream), openais.AuthenticationError)
        assert describe(error) == ("invalid_request_error", "invalid_api_key", None)

    @STREAM
    async def test_a_wrong_key_is_anthropics_error_of_it(self, say: Ask, stream: bool) -> None:
        asked = say(stream=stream)
        await catch_anthropics(asked, anthropics.AuthenticationError, "authentication_error")


class TestOverTheRate:
    """A tenant that may send one request a minute."""

    @pytest.fixture
    def access_settings(self) -> AccessSettings:
        return AccessSettings(tenant_requests_per_minute=1)

    @pytest.fixture
    async def spent(self, api: Any) -> None:
        assert (await api.http.get("/v1/models")).status_code == 200

    @DOORS
    @STREAM
    async def test_a_request_too_many_is_openais_error_of_it(
        self, spent: None, ask: Ask, door: str, stream: bool
    ) -> None:
        error = await catch(ask(door, stream=stream), openais.RateLimitError)
        assert describe(error) == ("rate_limit_error", "rate_limit_exceeded", None)
        assert int(error.response.headers["retry-after"]) > 0

    @STREAM
    async def test_a_request_too_many_is_anthropics_error_of_it(
        self, say: Ask, stream: bool
    ) -> None:
        assert (await say()).content
        asked = say(stream=stream)
        error = await catch_anthropics(asked, anthropics.RateLimitError, "rate_limit_error")
        assert int(error.response.headers["retry-after"]) > 0
