"""Bad input and failures: a problem with a stable type, the field and the limit; no change."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from kvrecall.domain import errors
from kvrecall.domain.codes import ErrorCode
from kvrecall.protocol.v1 import worker_pb2 as pb

USER = {"role": "user", "content": "hello"}
TURNS = "/v1/sessions/{session}/turns"
EVENTS = "/v1/sessions/{session}/events"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def check_problem(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Assert that a response is the expected problem; return its members."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    members: dict[str, Any] = answer.json()
    assert (members["status"], members["code"]) == (status, code), members
    assert members["type"] == f"urn:kvrecall:problem:{code.replace('_', '-')}"
    assert members["title"]
    assert members["detail"]
    return members


BAD_BODIES = [
    ("/v1/sessions", {"budget": 15}, 422, "budget_out_of_range", {"field": "budget", "limit": 16}),
    (
        "/v1/sessions",
        {"budget": 1025},
        422,
        "budget_out_of_range",
        {"field": "budget", "limit": 1024},
    ),
    (
        "/v1/sessions",
        {"budget": 64, "research": {"repair_rows": 49}},
        422,
        "budget_out_of_range",
        {"field": "research.repair_rows"},
    ),
    (
        "/v1/sessions",
        {"research": {"method": "magic"}},
        422,
        "unknown_method",
        {"field": "research.method"},
    ),
    ("/v1/sessions", {"method": "snapkv"}, 422, "invalid_request", {"field": "method"}),
    ("/v1/sessions", {"model": "gpt"}, 422, "unknown_model", {"field": "model"}),
    (
        "/v1/sessions",
        {"research": {"method_settings": {"bad": 1}}},
        422,
        "bad_settings",
        {"field": "research.method_settings.bad"},
    ),
    ("/v1/sessions", {"budget": "64"}, 422, "invalid_request", {"field": "budget"}),
    ("/v1/sessions", {"budget": 1.5}, 422, "invalid_request", {"field": "budget"}),
    ("/v1/sessions", {"budget": True}, 422, "invalid_request", {"field": "budget"}),
    ("/v1/sessions", {"id": "mine"}, 422, "invalid_request", {"field": "id"}),
    (
        "/v1/sessions",
        {"research": {"repair_on": ["never"]}},
        422,
        "invalid_request",
        {"field": "research.repair_on[0]"},
    ),
    (
        "/v1/sessions",
        {"research": {"repair_seconds": 0}},
        422,
        "invalid_request",
        {"field": "research.repair_seconds"},
    ),
    (
        "/v1/sessions",
        {"research": {"reselect": {"every": 0}}},
        422,
        "invalid_request",
        {"field": "research.reselect.every"},
    ),
    (
        "/v1/sessions",
        {"research": {"reselect": {"first": 4}}},
        422,
        "invalid_request",
        {"field": "research.reselect.first"},
    ),
    (
        "/v1/sessions",
        {"research": {"prefill": {"sparse": "on", "min_rows": 8192}}},
        422,
        "invalid_request",
        {"field": "research.prefill.min_rows"},
    ),
    (
        "/v1/sessions",
        {"research": {"retrieve": {"nodes": 192}}},
        422,
        "invalid_request",
        {"field": "research.retrieve.nodes"},
    ),
    (
        "/v1/sessions",
        {"research": {"repair_settings": {"fade_after": 0.93}}},
        422,
        "invalid_request",
        {"field": "research.repair_settings.fade_after"},
    ),
    (
        "/v1/sessions",
        {"research": {"reselect": 16}},
        422,
        "invalid_request",
        {"field": "research.reselect"},
    ),
    (
        "/v1/sessions",
        {"research": {"repair_settings": []}},
        422,
        "invalid_request",
        {"field": "research.repair_settings"},
    ),
    (
        "/v1/sessions",
        {"research": {"repair_settings": {"bad": 1}}},
        422,
        "invalid_request",
        {"field": "research.repair_settings.bad"},
    ),
    ("/v1/sessions", {"seed": 2**63}, 422, "invalid_request", {"field": "seed"}),
    (
        "/v1/sessions",
        {"metadata": {"a": "x" * 1025}},
        422,
        "invalid_request",
        {"field": "metadata.a"},
    ),
    (
        "/v1/sessions",
        {"research": {"episodes": {}}},
        422,
        "episodes_unsupported",
        {"field": "research.episodes"},
    ),
    (
        "/v1/sessions",
        {"research": {"episodes": 4}},
        422,
        "invalid_request",
        {"field": "research.episodes"},
    ),
    (
        "/v1/sessions",
        {"research": {"episodes": {"count": 0}}},
        422,
        "invalid_request",
        {"field": "research.episodes.count"},
    ),
    (
        "/v1/sessions",
        {"research": {"episodes": {"count": "many"}}},
        422,
        "invalid_request",
        {"field": "research.episodes.count"},
    ),
    (
        "/v1/sessions",
        {"research": {"episodes": {"clusters": 4}}},
        422,
        "invalid_request",
        {"field": "research.episodes.clusters"},
    ),
    (
        "/v1/sessions",
        {"research": {"episodes": {"build": "slow"}}},
        422,
        "invalid_request",
        {"field": "research.episodes.build"},
    ),
    (
        "/v1/sessions",
        {"research": {"layer_budgets": "steep"}},
        422,
        "invalid_request",
        {"field": "research.layer_budgets"},
    ),
    ("/v1/sessions", [], 422, "invalid_request", {}),
    (TURNS, {}, 422, "empty_turn", {"field": "messages"}),
    (
        TURNS,
        {"messages": [{"role": "robot"}]},
        422,
        "invalid_request",
        {"field": "messages[0].role"},
    ),
    (
        TURNS,
        {"messages": [{"role": "user", "content": 7}]},
        422,
        "invalid_request",
        {"field": "messages[0].content"},
    ),
    (TURNS, {"messages": [{**USER, "content": "x" * 2001}]}, 413, "turn_too_long", {"limit": 2000}),
    (TURNS, {"messages": [USER] * 513}, 413, "body_too_large", {"limit": 10_000}),
    (TURNS, {"messages": [{"role": "user"}] * 400 * 2}, 413, "body_too_large", {}),
    (
        TURNS,
        {"messages": [{"role": "tool"}]},
        422,
        "invalid_request",
        {"field": "messages[0].tool_call_id"},
    ),
    (
        TURNS,
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}]},
        409,
        "tool_result_without_call",
        {},
    ),
    (
        TURNS,
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        409,
        "calls_outstanding",
        {"calls": ["c1"]},
    ),
    (
        TURNS,
        {"messages": [USER], "max_tokens": 101},
        422,
        "limit_exceeded",
        {"field": "max_tokens", "limit": 100},
    ),
    (
        TURNS,
        {"messages": [USER], "temperature": -1},
        422,
        "invalid_request",
        {"field": "temperature"},
    ),
    (
        TURNS,
        {"messages": [USER], "stop": [""]},
        422,
        "invalid_request",
        {"field": "stop[0]"},
    ),
    (
        TURNS,
        {"messages": [USER], "logprobs": {"compare_with": "x"}},
        422,
        "invalid_request",
        {"field": "logprobs.compare_with"},
    ),
    # Names of earlier versions.
    (TURNS, {"messages": [USER], "sampling": {}}, 422, "invalid_request", {"field": "sampling"}),
    (TURNS, {"messages": [USER], "fidelity": {}}, 422, "invalid_request", {"field": "fidelity"}),
    (
        TURNS,
        {"messages": [USER], "logprobs": {"keep": True}},
        422,
        "invalid_request",
        {"field": "logprobs.keep"},
    ),
    (
        TURNS,
        {"messages": [USER], "wait_for_repairs": None},
        422,
        "invalid_request",
        {"field": "wait_for_repairs"},
    ),
    (EVENTS, {}, 422, "invalid_request", {}),
    (
        EVENTS,
        {"type": "tool_call.delta", "call_id": "c1", "delta": "x", "index": -1},
        422,
        "invalid_request",
        {},
    ),
    (EVENTS, {"type": "tool_call.exploded", "call_id": "c1"}, 422, "invalid_request", {}),
    (EVENTS, {"type": "tool_call.completed", "call_id": "c1"}, 422, "invalid_request", {}),
    (
        EVENTS,
        {"type": "tool_call.completed", "call_id": "c1", "result": "x"},
        404,
        "unknown_call",
        {"call": "c1"},
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "code", "members"), BAD_BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_body_is_rejected_and_changes_nothing(
    api: Any, path: Any, body: Any, status: Any, code: Any, members: Any, stream: Any
) -> None:
    if stream and path == TURNS:
        body = {**body, "stream": True}
    session = await api.session()
    before = await api.catalog.sessions.get(session)
    answer = await api.http.post(path.format(session=session), json=body)
    problem = check_problem(answer, status, code)
    assert members.items() <= problem.items()
    assert await api.catalog.sessions.get(session) == before
    assert await api.catalog.sessions.get_ids() == [session]
    assert set(api.worker.sessions) == {session}


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"budget": NaN}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b"[" * 5000,
        b'{"budget": 1e999}',
        b"nul",
    ],
)
async def test_a_body_that_is_no_json_in_utf8_is_rejected(api: Any, content: bytes) -> None:
    answer = await api.http.post(
        "/v1/sessions", content=content, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (400, 422)
    check_problem(
        answer,
        answer.status_code,
        "malformed_json" if answer.status_code == 400 else "invalid_request",
    )
    assert await api.catalog.sessions.get_ids() == []


async def test_an_oversize_body_is_rejected_with_and_without_a_content_length(api: Any) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    for content in (b"x" * 10_001, parts()):
        members = check_problem(
            await api.http.post("/v1/sessions", content=content), 413, "body_too_large"
        )
        assert members["limit"] == 10_000


async def test_a_body_of_another_content_type_is_rejected(api: Any) -> None:
    headers = {"Content-Type": "text/plain"}
    members = check_problem(
        await api.http.post("/v1/sessions", content=b"hi", headers=headers),
        422,
        "invalid_request",
    )
    assert "content-type 'text/plain'; expected a JSON object" in members["detail"]
    members = check_problem(await api.http.post("/v1/sessions", json=[1]), 422, "invalid_request")
    assert members["detail"] == "the body should be a JSON object"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_route"),
        ("PUT", "/v1/sessions", 405, "method_not_allowed"),
        ("GET", "/v1/sessions/x", 404, "unknown_session"),
        ("GET", "/v1/sessions/%ff%00", 404, "unknown_session"),
        ("DELETE", "/v1/sessions/x", 404, "unknown_session"),
        ("GET", "/v1/sessions/x/memory", 404, "unknown_session"),
        ("GET", "/v1/sessions?limit=0", 422, "invalid_request"),
        ("GET", "/v1/sessions?limit=201", 422, "invalid_request"),
        ("GET", "/v1/sessions?cursor=nonsense", 422, "invalid_request"),
    ],
)
async def test_a_bad_request_line_is_rejected(
    api: Any, method: str, path: str, status: int, code: str
) -> None:
    check_problem(await api.http.request(method, path), status, code)


async def test_unknown_sessions_are_unknown_to_writes(api: Any) -> None:
    check_problem(await api.turn("unknown"), 404, "unknown_session")
    check_problem(await api.turn("unknown", stream=True), 404, "unknown_session")
    event = {"type": "tool_call.started", "call_id": "c1"}
    check_problem(
        await api.http.post("/v1/sessions/unknown/events", json=event), 404, "unknown_session"
    )


async def test_a_wrong_method_gets_the_allowed_ones(api: Any) -> None:
    assert (await api.http.put("/v1/sessions")).headers["allow"]


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_an_idempotency_key_has_bounds(api: Any, key: str) -> None:
    answer = await api.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": key})
    check_problem(answer, 422, "invalid_request")


async def test_another_result_for_the_same_call_is_a_conflict(api: Any) -> None:
    session = await api.session()
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")]]
    await api.turn(session)
    url = EVENTS.format(session=session)
    event = {"type": "tool_call.completed", "call_id": "c1", "result": "a"}
    assert (await api.http.post(url, json=event)).status_code == 200
    check_problem(await api.http.post(url, json={**event, "result": "b"}), 409, "result_conflict")


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (errors.WorkerLost("gone"), 503, "worker_lost"),
        (errors.WorkerRefused(ErrorCode.TURN_TOO_LONG, "past the context"), 413, "turn_too_long"),
        (errors.WorkerRefused(ErrorCode.BAD_MESSAGES, "no such role"), 422, "bad_messages"),
        (errors.WorkerRefused(ErrorCode.OVERLOADED, "every slot runs"), 429, "overloaded"),
        (errors.WorkerRefused(ErrorCode.WORKER_ERROR, "an IndexError"), 500, "worker_error"),
        (errors.Overloaded("too many", 2.5), 429, "overloaded"),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
async def test_an_error_of_the_worker_becomes_a_problem(
    api: Any, parse_events: Callable[[str], Any], fault: Exception, status: int, code: str
) -> None:
    session = await api.session()
    api.worker.faults["turn"] = fault
    answer = await api.turn(session)
    members = check_problem(answer, status, code)
    assert "secret" not in members["detail"]
    repeated = code in ("worker_lost", "overloaded", "internal_error")
    assert answer.headers.get("x-should-retry") == (None if repeated else "false")
    if status in (429, 503):
        assert answer.headers["retry-after"] == (
            "3" if getattr(fault, "retry_after_seconds", 1) > 2 else "1"
        )

    api.worker.faults["token"] = fault
    streamed = await api.turn(session, stream=True)
    assert streamed.status_code == 200
    (name, members) = parse_events(streamed.text)[-1]
    assert (name, members["status"], members["code"]) == ("error", status, code)
    assert (await api.catalog.sessions.get(session)).turns == 0
    if isinstance(fault, errors.WorkerLost):
        # It may have killed a worker twice: the same turn is refused for a while.
        refused = await api.turn(session)
        check_problem(refused, 503, "turn_quarantined")
        assert int(refused.headers["retry-after"]) > 1
    assert (await api.turn(session, "another")).json()["turn"] == 1


def test_every_domain_error_has_a_status() -> None:
    kinds = set()
    open_kinds = [errors.ServiceError]
    while open_kinds:
        kind = open_kinds.pop()
        kinds.add(kind)
        open_kinds += kind.__subclasses__()
    codes = [kind.code for kind in kinds if "code" in vars(kind)]
    assert len(codes) == len(set(codes))
    assert all(400 <= code.http_status < 600 for code in ErrorCode)
    assert all(code.grpc_status in grpc.StatusCode.__members__ for code in ErrorCode)
    assert ErrorCode.parse("not a code of this version").http_status == 422
    assert errors.DuplicateCall("f", "x").code.http_status == 422
