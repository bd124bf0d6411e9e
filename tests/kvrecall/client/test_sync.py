"""Blocking client against the served application."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvrecall import KvrecallClient, KvrecallError
from kvrecall.client import (
    AccessDenied,
    Conflict,
    ConnectionFailed,
    InvalidRequest,
    Message,
    NotFound,
    Overloaded,
    ServiceProblem,
    TextDelta,
    ToolCallEvent,
    TurnCompleted,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
RECORDED_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "tool_calls": [CALL]},
]


def test_a_session_is_created_read_listed_and_deleted(client: KvrecallClient) -> None:
    session = client.create_session(budget=64, research={"repair_on": []}, metadata={"a": "b"})
    assert client.get_session(session) == client.get_session(session.id) == session
    assert (session.budget, session.metadata, session.turns) == (64, {"a": "b"}, 0)
    assert session in client.list_sessions(limit=1).sessions
    turn = client.turn(session.id, [{"role": "user", "content": "hi"}])
    assert (turn.text, turn.message) == ("ok", Message("assistant", "ok"))
    assert client.memory(session).length == 3
    assert client.episodes(session).episodes == ()
    assert client.repairs(session, limit=3) == ()
    client.delete_session(session)
    with pytest.raises(NotFound) as caught:
        client.get_session(session)
    assert (caught.value.status, caught.value.code) == (404, "unknown_session")
    assert caught.value.details == {"session": session.id}


def test_a_salt_is_given_at_creation_and_is_not_empty(client: KvrecallClient) -> None:
    session = client.create_session(cache_salt="zebra")
    assert "zebra" not in str(session)
    with pytest.raises(InvalidRequest) as caught:
        client.create_session(cache_salt="")
    assert caught.value.details["field"] == "cache_salt"


def test_the_service_describes_itself(client: KvrecallClient) -> None:
    assert client.ready()
    assert client.worker().model == "scripted"
    methods = client.methods()
    assert [method.name for method in methods.methods] == ["icecache", "snapkv", "full", "epicache"]
    assert methods.repair is not None
    assert methods.repair.name == "repairkv"
    assert len(client.workers()) == 1


@pytest.mark.parametrize(
    "messages",
    [
        "Hello",
        Message.user("Hello"),
        {"role": "user", "content": "Hello"},
        [Message.user("Hello")],
        [{"role": "user", "content": "Hello"}],
    ],
)
def test_messages_are_given_as_text_one_message_or_a_list(
    client: KvrecallClient, messages: Any
) -> None:
    with client.session() as session:
        turn = client.turn(session, messages, max_tokens=60, temperature=0)
        assert (turn.turn, turn.text, turn.finish_reason) == (1, "ok", "stop")
        assert turn.usage.prompt_tokens == 2
        assert turn.seconds_to_first_token > 0


def test_a_session_object_is_deleted_at_the_end_unless_kept(client: KvrecallClient) -> None:
    with client.session(budget=64, research={"repair_on": []}) as session:
        assert session.say("Hello").turn == 1
        assert session.get().turns == 1
        assert session.memory().budget == 64
        assert session.episodes().settings is None
        assert session.repairs() == ()
        with session.fork() as fork:
            assert fork.say("Hello").turn == 2
            origin = fork.get().forked_from
            assert origin is not None
            assert (origin.session, origin.turn) == (session.id, 1)
        with pytest.raises(NotFound):
            fork.get()
    with pytest.raises(NotFound):
        session.get()
    with client.session(keep=True) as kept:
        pass
    with client.attach(kept.id) as attached:
        assert attached.get().turns == 0
    kept.delete()
    with client.session() as deleted:
        deleted.delete()


def test_a_turn_is_streamed_as_typed_events(client: KvrecallClient) -> None:
    session = client.create_session()
    with client.stream(session, "hi", key="k") as stream:
        assert stream.turn is None
        events = list(stream)
    assert events[0] == TextDelta("ok ")
    assert isinstance(events[-1], TurnCompleted)
    assert events[-1].turn == stream.turn
    assert client.stream(session, "hi", key="k").read() == stream.turn
    assert client.get_session(session).turns == 1


def test_a_recorded_tool_call_is_paused_and_resumed_by_its_result(client: KvrecallClient) -> None:
    with client.session(research={"repair_rows": 8}) as session:
        appended = session.say(RECORDED_CALL, generate=False)
        assert (appended.message, appended.finish_reason, appended.text) == (None, "appended", "")
        (pending,) = session.get().pending_calls
        assert (pending.id, pending.status) == ("c1", "pending")
        assert session.tool_started("c1", arguments='{"n": 1}').outstanding == ("c1",)
        session.tool_delta("c1", "7", index=0)
        assert session.tool_result("c1", "7").outstanding == ()
        turn = session.say(wait_for_repairs=True, repair=True)
        assert turn.turn == 2
        triggers = [repair.trigger for repair in session.repairs()]
        assert triggers[:2] == ["turn", "tool_result"]
        assert set(triggers[2:]) == {"tool_call"}
        assert turn.memory.repair.repairs == len(turn.memory.repairs) > 0


def test_a_failed_tool_call_is_reported(client: KvrecallClient) -> None:
    with client.session() as session:
        session.say(RECORDED_CALL, generate=False)
        assert session.tool_failed("c1", "not available").status == "failed"
        assert session.say().turn == 2


def test_problems_are_raised_by_their_status(client: KvrecallClient) -> None:
    session = client.create_session()
    with pytest.raises(InvalidRequest, match="empty_turn") as empty:
        client.stream(session, []).read()
    assert empty.value.details["field"] == "messages"
    with pytest.raises(InvalidRequest) as nested:
        client.turn(session, "hi", sampling={"max_tokens": 3})  # type: ignore[call-arg]
    assert (nested.value.status, nested.value.details["field"]) == (422, "sampling")
    with pytest.raises(InvalidRequest) as limited:
        client.turn(session, "hi", max_tokens=-1)
    assert limited.value.details["field"] == "max_tokens"
    client.turn(session, RECORDED_CALL, generate=False)
    with pytest.raises(Conflict) as conflict:
        client.turn(session, "hi")
    assert (conflict.value.code, conflict.value.details["calls"]) == ("calls_outstanding", ["c1"])


def test_an_unreachable_service_is_an_error() -> None:
    with KvrecallClient("http://127.0.0.1:1", max_retries=1) as client:
        assert not client.ready()
        with pytest.raises(ConnectionFailed) as caught:
            client.list_sessions()
        with pytest.raises(ConnectionFailed):
            client.stream("s_1", "hi").read()
    assert isinstance(caught.value, KvrecallError)
    assert (caught.value.status, caught.value.code) == (0, "connection_failed")


def test_a_write_whose_response_was_lost_is_retried_and_runs_once(
    client: KvrecallClient, live_url: str, flaky_transport: Callable[..., Any]
) -> None:
    session = client.create_session()
    transport = flaky_transport(1)
    with KvrecallClient(live_url, max_retries=2, transport=transport) as flaky:
        assert flaky.turn(session, "hi").turn == 1
    first, second = transport.requests
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"] != ""
    assert client.get_session(session).turns == 1


def test_without_retries_a_lost_response_is_an_error_and_the_callers_key_repeats_the_turn(
    client: KvrecallClient, live_url: str, flaky_transport: Callable[..., Any]
) -> None:
    session = client.create_session()
    transport = flaky_transport(1)
    with KvrecallClient(live_url, transport=transport) as flaky:
        with pytest.raises(ConnectionFailed):
            flaky.turn(session, "hi", key="mine")
        assert flaky.turn(session, "hi", key="mine").turn == 1
    assert {request.headers["Idempotency-Key"] for request in transport.requests} == {"mine"}


@pytest.mark.parametrize(
    ("status", "code", "error"), [(429, "overloaded", Overloaded), (409, "session_busy", Conflict)]
)
def test_a_request_is_retried_after_the_delay_that_the_service_names(
    status: int,
    code: str,
    error: type[ServiceProblem],
    client: KvrecallClient,
    live_url: str,
    flaky_transport: Callable[..., Any],
) -> None:
    def refuse() -> httpx.Response:
        problem = {"status": status, "code": code, "detail": "another turn runs"}
        return httpx.Response(status, json=problem, headers={"Retry-After": "0"})

    session = client.create_session()
    with KvrecallClient(live_url, transport=flaky_transport(1, refuse)) as flaky:
        with pytest.raises(error, match="another turn runs") as caught:
            flaky.get_session(session)
        assert caught.value.retry_after_seconds == 0
    transport = flaky_transport(1, refuse)
    with KvrecallClient(live_url, max_retries=1, transport=transport) as flaky:
        assert flaky.get_session(session) == session
    assert "Idempotency-Key" not in transport.requests[0].headers


def test_a_conflict_that_stays_is_not_retried(
    client: KvrecallClient, live_url: str, flaky_transport: Callable[..., Any]
) -> None:
    def refuse() -> httpx.Response:
        return httpx.Response(409, json={"status": 409, "code": "not_waiting", "detail": "no call"})

    session = client.create_session()
    with (
        KvrecallClient(live_url, max_retries=1, transport=flaky_transport(1, refuse)) as flaky,
        pytest.raises(Conflict, match="no call"),
    ):
        flaky.get_session(session)


def test_a_tenant_sees_its_own_sessions_only(client: KvrecallClient, live_url: str) -> None:
    with KvrecallClient(live_url, tenant="ann") as ann, ann.session() as session:
        assert [known.id for known in ann.list_sessions().sessions] == [session.id]
        with pytest.raises(NotFound):
            client.get_session(session)


@pytest.mark.parametrize(
    ("given", "environment", "sent"),
    [
        (None, None, None),
        ("kvr-given", None, "Bearer kvr-given"),
        (None, "kvr-env", "Bearer kvr-env"),
        ("kvr-given", "kvr-env", "Bearer kvr-given"),
        ("", "kvr-env", None),
    ],
)
def test_a_key_is_the_given_one_or_the_environments(
    given: str | None, environment: str | None, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVRECALL_API_KEY", raising=False)
    if environment is not None:
        monkeypatch.setenv("KVRECALL_API_KEY", environment)
    members = {"code": "invalid_api_key", "detail": "the key is unknown"}

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers.get("Authorization") == sent
        return httpx.Response(401, json=members)

    transport = httpx.MockTransport(handle)
    with (
        KvrecallClient("http://t", api_key=given, transport=transport) as client,
        pytest.raises(AccessDenied) as caught,
    ):
        client.list_sessions()
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_tool_calls_are_typed_in_streams_and_turns() -> None:
    """A tool call of the model; the stub of `live_url` makes none, so the wire text is given."""
    events = [f"event: tool_call\ndata: {_json(CALL)}\n\n"]

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=": waiting\n\n" + "".join(events))

    with KvrecallClient("http://t", transport=httpx.MockTransport(handle)) as client:
        stream = client.stream("s_1", "hi")
        event = next(stream)
        assert isinstance(event, ToolCallEvent)
        assert (event.call.name, event.call.arguments) == ("f", {"n": 1})
        with pytest.raises(ConnectionFailed, match="stream_broken"):
            stream.read()


def _json(value: Any) -> str:
    return httpx.Request("POST", "http://t", json=value).read().decode()
