"""Bad input through either API: the same code and the same field, and nothing is changed."""

from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError, Overloaded
from kvrecall.domain.limits import ServiceLimits
from tests.gateway.contract.clients import Client, Refused
from tests.gateway.contract.conftest import Both

USER = {"role": "user", "content": "hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NO_ARGUMENTS = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "[]"}}

CREATIONS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"budget": 15}, "budget_out_of_range", ["budget"]),
    ({"budget": 1025}, "budget_out_of_range", ["budget"]),
    ({"budget": -1}, "invalid_request", ["budget"]),
    (
        {"budget": 64, "research": {"repair_rows": 49}},
        "budget_out_of_range",
        ["research.repair_rows"],
    ),
    ({"research": {"method": "magic"}}, "unknown_method", ["research.method"]),
    ({"research": {"method": "m" * 257}}, "invalid_request", ["research.method"]),
    ({"model": "gpt"}, "unknown_model", ["model"]),
    (
        {"research": {"method_settings": {"bad": 1}}},
        "bad_settings",
        ["research.method_settings.bad"],
    ),
    (
        {"research": {"repair_settings": {"bad": 1}}},
        "invalid_request",
        ["research.repair_settings.bad"],
    ),
    ({"research": {"prefill": {"alpha": 2}}}, "invalid_request", ["research.prefill.alpha"]),
    ({"research": {"retrieve": {"shar": 1}}}, "invalid_request", ["research.retrieve.shar"]),
    ({"recall": False, "research": {"method": "snapkv"}}, "invalid_request", ["research"]),
    ({"seed": -1}, "invalid_request", ["seed"]),
    ({"metadata": {"a": "x" * 1025}}, "invalid_request", ["metadata.a"]),
    ({"research": {"episodes": {}}}, "episodes_unsupported", ["research.episodes"]),
    ({"research": {"episodes": {"count": 0}}}, "invalid_request", ["research.episodes.count"]),
    (
        {"research": {"method": "icecache", "method_settings": {"prompt_tokens": 1}}},
        "bad_settings",
        ["research.method_settings.prompt_tokens"],
    ),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "invalid_request", []),
    (
        {"chat_template_kwargs": {"year": 2026, "tools": [], "messages": 1}},
        "invalid_request",
        ["chat_template_kwargs.messages", "chat_template_kwargs.tools"],
    ),
    ({"research": {"repair_on": ["turn"] * 6}}, "invalid_request", ["research.repair_on"]),
]
TURNS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({}, "empty_turn", ["messages"]),
    ({"messages": [{"content": "hello"}]}, "invalid_request", ["messages[0].role"]),
    ({"messages": [{**USER, "content": "x" * 2001}]}, "turn_too_long", ["messages"]),
    (
        {"messages": [USER, {"role": "tool", "content": "x"}]},
        "invalid_request",
        ["messages[1].tool_call_id"],
    ),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
        "tool_result_without_call",
        ["messages[0].tool_call_id"],
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "calls_outstanding", []),
    (
        {"messages": [{"role": "assistant", "tool_calls": [CALL, CALL]}]},
        "duplicate_call",
        ["messages[0].tool_calls"],
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [NO_ARGUMENTS]}]},
        "invalid_request",
        ["messages[0].tool_calls[0].arguments"],
    ),
    ({"messages": [USER], "max_tokens": 101}, "limit_exceeded", ["max_tokens"]),
    ({"messages": [USER], "max_tokens": 0}, "invalid_request", ["max_tokens"]),
    ({"messages": [USER], "temperature": 2.5}, "invalid_request", ["temperature"]),
    ({"messages": [USER], "top_p": 0}, "invalid_request", ["top_p"]),
    ({"messages": [USER], "top_k": -1, "seed": -1}, "invalid_request", ["top_k", "seed"]),
    ({"messages": [USER], "stop": [""]}, "invalid_request", ["stop[0]"]),
    ({"messages": [USER], "stop": ["x"] * 129}, "invalid_request", ["stop"]),
    (
        {"messages": [USER], "logprobs": {"compare_with": "s_none"}},
        "invalid_request",
        ["logprobs.compare_with"],
    ),
]
EVENTS: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"type": "tool_call.started", "call_id": "c9"}, "unknown_call", []),
    ({"type": "tool_call.started", "call_id": ""}, "invalid_request", ["call_id"]),
    (
        {"type": "tool_call.delta", "call_id": "c1", "delta": "x", "index": -1},
        "invalid_request",
        ["index"],
    ),
    (
        {"type": "tool_call.started", "call_id": "c1", "arguments": "["},
        "invalid_request",
        ["arguments"],
    ),
    (
        {"type": "tool_call.completed", "call_id": "c1", "result": "x" * 501},
        "limit_exceeded",
        ["result"],
    ),
]


@pytest.fixture
def service_settings() -> ServiceLimits:
    return ServiceLimits(
        queue_seconds=5,
        max_turn_bytes=2000,
        max_result_bytes=500,
        default_max_tokens=50,
        max_output_tokens=100,
    )


async def refuse(call: Any, code: str, fields: list[str]) -> Refused:
    """Assert that a call is refused with this code for these fields."""
    with pytest.raises(Refused) as refused:
        await call
    assert refused.value.code == code
    assert not fields or refused.value.fields == fields
    return refused.value


@pytest.mark.parametrize(("body", "code", "fields"), CREATIONS)
async def test_a_bad_session_is_refused(
    client: Client, body: dict[str, Any], code: str, fields: list[str]
) -> None:
    await refuse(client.create(body), code, fields)
    assert (await client.page())["sessions"] == []


async def test_a_repair_is_limited_to_an_hour(both: Both) -> None:
    for seconds in (0, 3601):
        body = {"research": {"repair_seconds": seconds}}
        await refuse(both.rest.create(body), "invalid_request", ["research.repair_seconds"])
        await refuse(both.rpc.create(body), "invalid_request", ["research.repair_timeout"])


@pytest.mark.parametrize(("body", "code", "fields"), TURNS)
async def test_a_bad_turn_is_refused(
    client: Client, body: dict[str, Any], code: str, fields: list[str]
) -> None:
    view = await client.create({"budget": 64})
    for call in (client.turn, client.stream):
        await refuse(call(view["id"], body), code, fields)
    assert await client.get(view["id"]) == view


@pytest.mark.parametrize(("body", "code", "fields"), EVENTS)
async def test_a_bad_event_is_refused(
    client: Client, body: dict[str, Any], code: str, fields: list[str]
) -> None:
    session = (await client.create({"budget": 64}))["id"]
    recorded = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    await client.turn(session, {"messages": recorded, "generate": False})
    before = await client.get(session)
    await refuse(client.event(session, body), code, fields)
    assert (await client.get(session))["pending_calls"] == before["pending_calls"]


async def test_what_is_not_there_is_not_found(client: Client) -> None:
    for call in (
        client.get("s_none"),
        client.delete("s_none"),
        client.fork("s_none"),
        client.move("s_none"),
        client.turn("s_none", {"messages": [USER]}),
        client.stream("s_none", {"messages": [USER]}),
        client.event("s_none", {"type": "tool_call.started", "call_id": "c"}),
        *(client.read("s_none", what) for what in ("memory", "repairs", "episodes")),
    ):
        await refuse(call, "unknown_session", [])
    session = (await client.create())["id"]
    await refuse(client.fork(session, {"turn": 1}), "unknown_turn", [])
    await refuse(client.fork(session, {"turn": -1}), "invalid_request", ["turn"])


async def test_lists_have_limits(client: Client) -> None:
    session = (await client.create())["id"]
    for limit in (0, 201):
        await refuse(client.page(limit=limit), "invalid_request", ["limit"])
    await refuse(client.page(cursor="nonsense"), "invalid_request", ["cursor"])
    await refuse(client.read(session, "repairs", limit=33), "invalid_request", ["limit"])


async def test_a_move_without_another_worker_is_refused(client: Client) -> None:
    session = (await client.create())["id"]
    await refuse(client.move(session, {"worker": "two"}), "invalid_request", ["worker"])


async def test_another_tenants_session_is_unknown(client: Client) -> None:
    client.tenant = "ann"
    session = (await client.create())["id"]
    await client.turn(session, {"messages": [USER]})
    for client.tenant in ("ben", ""):
        assert (await client.page())["sessions"] == []
        for call in (
            client.get(session),
            client.delete(session),
            client.fork(session),
            client.move(session),
            client.turn(session, {"messages": [USER]}),
            client.event(session, {"type": "tool_call.started", "call_id": "c"}),
            *(client.read(session, what) for what in ("memory", "repairs", "episodes")),
        ):
            await refuse(call, "unknown_session", [])
    client.tenant = "ann"
    assert (await client.get(session))["turns"] == 1


async def test_two_tenants_may_use_the_same_key(client: Client) -> None:
    made = []
    for client.tenant in ("ann", "ben", "ann", ""):
        made.append((await client.create(key="k"))["id"])
    assert made[0] == made[2]
    assert len(set(made)) == 3


@pytest.mark.parametrize(
    ("fault", "code"),
    [(Overloaded("too much", 2.0), "overloaded"), (CatalogError("at 10.1.2.3"), "catalog_error")],
)
async def test_a_transient_failure_advises_to_retry_and_reveals_no_address(
    both: Both, client: Client, fault: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr(both.catalog.sessions, "get", fail)
    refused = await refuse(client.get("s_1"), code, [])
    assert refused.retry
    assert "10.1.2.3" not in str(refused.__cause__)


async def test_a_stopped_service_refuses_writes(both: Both, client: Client) -> None:
    both.service._accepting = False
    assert (await refuse(client.create(), "shutting_down", [])).retry
