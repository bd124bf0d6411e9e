"""Bad input: a 4xx problem that names the field and the limit, and no change."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvrecall.client import TextDelta, TurnCompleted

Json = dict[str, Any]
ANSWER = {"role": "tool", "content": "12", "tool_call_id": "c1"}
HELLO = {"messages": [{"role": "user", "content": "Hello."}]}


@dataclass(frozen=True)
class Fault:
    """Bad request and its expected problem; `{idle}` and `{paused}` in a path are sessions."""

    name: str
    path: str
    body: Any
    status: int
    code: str
    says: tuple[str, ...] = ()
    field: str | None = None
    limit: int | None = None
    method: str = "POST"
    content_type: str = "application/json"


def turn(*messages: Json, **more: Any) -> Json:
    return {"messages": list(messages), **more}


def text(content: str) -> Json:
    return turn({"role": "user", "content": content}, generate=False)


IDLE = "/v1/sessions/{idle}/turns"
PAUSED = "/v1/sessions/{paused}/turns"
NEW = "/v1/sessions"
UNKNOWN = "/v1/sessions/s_0"
LONG = "hello " * 17_000
HUGE = "x" * (1_100_000)
FAULTS = [
    Fault("unknown session, turn", f"{UNKNOWN}/turns", HELLO, 404, "unknown_session", ("s_0",)),
    Fault(
        "unknown session, event",
        f"{UNKNOWN}/events",
        {"type": "tool_call.started", "call_id": "c"},
        404,
        "unknown_session",
    ),
    Fault(
        "unknown session, memory", f"{UNKNOWN}/memory", None, 404, "unknown_session", method="GET"
    ),
    Fault("unknown session, delete", UNKNOWN, None, 404, "unknown_session", method="DELETE"),
    Fault("turn over the context", IDLE, text(LONG), 413, "turn_too_long", ("16384",), "messages"),
    Fault(
        "turn of too many bytes",
        IDLE,
        text(HUGE),
        413,
        "turn_too_long",
        (str(1 << 20),),
        "messages",
        1 << 20,
    ),
    Fault(
        "turn of too many messages",
        IDLE,
        turn(*HELLO["messages"] * 513),
        413,
        "turn_too_long",
        ("512",),
        "messages",
        512,
    ),
    Fault(
        "full past its slot",
        "/v1/sessions/{full}/turns",
        text("hello " * 400),
        413,
        "turn_too_long",
        ("320",),
        "messages",
    ),
    Fault(
        "body over the limit",
        IDLE,
        text("x" * (2 << 20)),
        413,
        "body_too_large",
        (str(2 << 20),),
        "body",
        2 << 20,
    ),
    Fault(
        "budget under sinks and window",
        NEW,
        {"budget": 36},
        422,
        "budget_out_of_range",
        ("37",),
        "budget",
        37,
    ),
    Fault(
        "budget over a slot",
        NEW,
        {"budget": 257},
        422,
        "budget_out_of_range",
        ("256",),
        "budget",
        256,
    ),
    Fault(
        "budget is no number",
        NEW,
        {"budget": "many"},
        422,
        "invalid_request",
        ("budget",),
        "budget",
    ),
    Fault(
        "reserve over the budget",
        NEW,
        {"budget": 64, "research": {"method": "snapkv", "repair_rows": 28}},
        422,
        "budget_out_of_range",
        ("37",),
        "research.repair_rows",
        27,
    ),
    Fault(
        "unknown method",
        NEW,
        {"research": {"method": "magic"}},
        422,
        "unknown_method",
        ("magic", "snapkv"),
        "research.method",
    ),
    Fault(
        "method setting out of range",
        NEW,
        {"research": {"method": "snapkv", "method_settings": {"window": 0}}},
        422,
        "bad_settings",
        ("method_settings", "window", "1"),
        "research.method_settings.window",
    ),
    Fault(
        "unknown method setting",
        NEW,
        {"research": {"method_settings": {"colour": 1}}},
        422,
        "bad_settings",
        ("method_settings", "colour"),
        "research.method_settings.colour",
    ),
    Fault("unknown model", NEW, {"model": "gpt"}, 422, "unknown_model", ("gpt",), "model"),
    Fault("unknown field", NEW, {"bugdet": 128}, 422, "invalid_request", ("bugdet",), "bugdet"),
    Fault(
        "result without its call",
        IDLE,
        turn(ANSWER),
        409,
        "tool_result_without_call",
        ("c1",),
        "messages[0].tool_call_id",
    ),
    Fault(
        "result of another call",
        PAUSED,
        turn({**ANSWER, "tool_call_id": "c2"}),
        409,
        "tool_result_without_call",
        ("c2",),
        "messages[0].tool_call_id",
    ),
    Fault("turn in a pause", PAUSED, HELLO, 409, "calls_outstanding", ("c1",)),
    Fault("empty turn in a pause", PAUSED, turn(), 409, "calls_outstanding", ("c1",)),
    Fault(
        "event of an unknown call",
        "/v1/sessions/{paused}/events",
        {"type": "tool_call.completed", "call_id": "c9", "result": ""},
        404,
        "unknown_call",
        ("c9",),
    ),
    Fault(
        "event of no kind",
        "/v1/sessions/{paused}/events",
        {"type": "tool_call.eaten", "call_id": "c1"},
        422,
        "invalid_request",
    ),
    Fault("empty turn", IDLE, turn(), 422, "empty_turn", (), "messages"),
    Fault(
        "wrong role",
        IDLE,
        turn({"role": "wizard", "content": "a"}),
        422,
        "invalid_request",
        ("role",),
        "messages[0].role",
    ),
    Fault(
        "negative max_tokens",
        IDLE,
        {**HELLO, "max_tokens": -1},
        422,
        "invalid_request",
        ("1",),
        "max_tokens",
    ),
    Fault(
        "too many max_tokens",
        IDLE,
        {**HELLO, "max_tokens": 2001},
        422,
        "limit_exceeded",
        ("2000",),
        "max_tokens",
        2000,
    ),
    Fault("malformed JSON", IDLE, b'{"messages": [', 400, "malformed_json", ("JSON",), "body"),
    Fault(
        "invalid UTF-8",
        IDLE,
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        400,
        "malformed_json",
        ("UTF-8",),
        "body",
    ),
    Fault("no body", IDLE, b"", 422, "invalid_request"),
    Fault("no JSON", IDLE, b"hello", 422, "invalid_request", content_type="text/plain"),
    Fault("unknown route", "/v1/sesions", {}, 404, "unknown_route"),
    Fault("wrong method", IDLE, None, 405, "method_not_allowed", method="PUT"),
]


@pytest.fixture(scope="module")
def sessions(server, say) -> dict[str, str]:
    """Create three sessions: one idle, one paused, one that never evicts."""
    client = server.own
    made = {
        name: client.create_session(
            budget=128, research={"method": "snapkv", "repair_rows": 32}, seed=1
        ).id
        for name in ("idle", "paused")
    }
    made["full"] = client.create_session(research={"method": "full"}, budget=256).id
    for session in made.values():
        client.turn(session, [say.user(say.chatter(5, 5))], generate=False)
    client.turn(made["paused"], [say.asks("c1", name="Ada")], generate=False)

    def repaired() -> bool:  # the session is paused before the early repair, too
        return (
            client.memory(made["paused"]).promoted_rows > 0
            and client.get_session(made["paused"]).state == "paused"
        )

    say.until(repaired, "the end of the early repair")
    return made


def snapshot(client, sessions: dict[str, str]) -> list[Any]:
    """Read all sessions and their memory, without what other sessions and any request change."""
    memory = [
        replace(client.memory(session), in_slot=False, tier_bytes={})
        for session in sessions.values()
    ]
    return [client.list_sessions(200), *memory]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_bad_input_is_a_problem_and_changes_nothing(server, client, sessions, fault: Fault) -> None:
    before = snapshot(client, sessions)
    content = fault.body if isinstance(fault.body, bytes | None) else json.dumps(fault.body)
    headers = {"Content-Type": fault.content_type}
    answer = server.http.request(
        fault.method, fault.path.format(**sessions), content=content, headers=headers
    )
    assert answer.status_code == fault.status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (problem["status"], problem["code"]) == (fault.status, fault.code)
    assert problem["type"] == "urn:kvrecall:problem:" + fault.code.replace("_", "-")
    assert all(words in problem["detail"] for words in fault.says), problem["detail"]
    assert problem.get("field", "") == (fault.field or problem.get("field", ""))
    assert fault.limit is None or problem["limit"] == fault.limit
    assert snapshot(client, sessions) == before


def test_a_concurrent_turn_is_rejected_and_the_first_continues(
    server, client, new_session, say
) -> None:
    session = new_session()
    with client.stream(session, "Go on.", max_tokens=200) as events:
        assert isinstance(next(events), TextDelta)
        answer = server.http.post(f"/v1/sessions/{session}/turns", json=HELLO)
        assert (answer.status_code, answer.json()["code"]) == (409, "session_busy")
        assert isinstance(list(events)[-1], TurnCompleted)
    assert client.get_session(session).turns == 1
