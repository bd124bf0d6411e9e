"""A few requests to every door, for CI; `make fuzz` sends them for an hour. And it can fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis.errors import Unsatisfiable
from pydantic import ValidationError

from benchmarks.fuzz.attack import SHRINKS, attack
from benchmarks.fuzz.cases import bodies
from benchmarks.fuzz.cases.http_requests import ROUTES, http_requests
from benchmarks.fuzz.cases.json_text import Members, Token, encode_json
from benchmarks.fuzz.cleaning import delete_all
from benchmarks.fuzz.doors.base import Door
from benchmarks.fuzz.doors.wire import check_refused, check_worker_call
from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.neighbour import build_conversations, compare
from benchmarks.fuzz.replies import Checker
from benchmarks.fuzz.report import build_rows, write_findings
from benchmarks.fuzz.requests import Cut, Reply, Request
from benchmarks.fuzz.run import DOORS, Plan, run
from benchmarks.fuzz.watch import read_errors
from benchmarks.fuzz.world import World
from gateway.rest.schemas.turns import TurnBody

SECRET = "The password of ann is wintergreen-0."
CHECKER = Checker([SECRET])
PROBLEM = {
    "type": "urn:kvrecall:problem:x",
    "title": "x",
    "status": 422,
    "detail": "x",
    "code": "invalid_request",
}


def http(status: int, body: object, kind: str = "application/json", **more: object) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(str(status), kind, content, **more)  # type: ignore[arg-type]


def find(reply: Reply, path: str = "/v1/sessions", cut: Cut = Cut.NONE) -> list[str]:
    request = Request("sessions", "POST", path, cut=cut)
    return [problem.kind for problem in CHECKER.check_http(request, reply)]


def test_no_door_gives_way_and_the_neighbour_gets_her_answers(tmp_path: Path) -> None:
    found = run(Plan(seed=3, examples=8, conversations=2, visits=1), tmp_path)
    assert [each.describe() for each in found] == []
    assert {door for door, _ in found.replies} == set(DOORS)
    statuses = {status for _, status in found.replies}
    assert {"200", "400", "OK", "INVALID_ARGUMENT", "UNAUTHENTICATED"} <= statuses
    assert found.other["answers compared"] >= 3
    assert found.other["health checks"] > 0


def openai(status: int, code: str) -> Reply:
    error = {"message": "m", "type": "server_error", "param": None, "code": code}
    return http(status, {"error": error})


@pytest.mark.parametrize(
    ("reply", "path", "kind"),
    [
        (
            http(500, {**PROBLEM, "status": 500, "code": "internal_error"}),
            "/v1/x",
            "500 internal_error",
        ),
        (http(503, {**PROBLEM, "status": 503, "code": "worker_lost"}), "/v1/x", "503 worker_lost"),
        (http(422, {**PROBLEM, "status": 400}), "/v1/x", "an error without the form of its API"),
        (
            http(400, {"detail": "x"}),
            "/v1/chat/completions",
            "an error without the form of its API",
        ),
        (http(400, {"detail": "x"}), "/v1/messages", "an error without the form of its API"),
        (openai(503, "worker_lost"), "/v1/chat/completions", "503 worker_lost"),
        (http(500, b"oops", "text/plain"), "/v1/x", "an error 500 without JSON"),
        (http(200, b'{"x": NaN}'), "/v1/x", "a reply that is no JSON"),
        (http(200, b'{"x": "\xff"}'), "/v1/x", "a reply that is no JSON"),
        (http(200, {"x": "panicked at src/lib.rs:7"}), "/v1/x", "internals in a reply"),
        (http(200, {"x": "Traceback (most recent call last)"}), "/v1/x", "internals in a reply"),
        (http(200, {"x": SECRET}), "/v1/x", "another tenant's text"),
        (http(200, {}, seconds=500.0), "/v1/x", "late reply"),
        (Reply("none", error="ReadError('x')"), "/v1/x", "no whole reply: ReadError"),
        (
            http(200, b'data: {"error": {"code": "worker_lost"}}\n\n', "text/event-stream"),
            "/v1/chat/completions",
            "a stream that ends with worker_lost",
        ),
        (
            http(200, b'data: {"x": Infinity}\n\n', "text/event-stream"),
            "/v1/chat/completions",
            "an event that is no JSON",
        ),
    ],
)
def test_a_broken_reply_is_a_finding(reply: Reply, path: str, kind: str) -> None:
    assert find(reply, path) == [kind]


def test_what_a_service_may_say_is_none() -> None:
    assert find(http(422, PROBLEM)) == []
    assert find(http(503, {**PROBLEM, "status": 503, "code": "changed_meanwhile"})) == []
    assert find(http(200, b'data: {"a": 1}\n\ndata: [DONE]\n\n', "text/event-stream")) == []
    assert find(Reply("left", error="left"), cut=Cut.BODY) == []
    assert find(Reply("none", error="ReadTimeout"), cut=Cut.REPLY) != []


@pytest.mark.parametrize(
    ("check", "reply", "kinds"),
    [
        (CHECKER.check_call, Reply("UNKNOWN"), ["UNKNOWN"]),
        (CHECKER.check_call, Reply("INTERNAL", code="internal_error"), ["INTERNAL internal_error"]),
        (CHECKER.check_call, Reply("UNAVAILABLE", code="worker_lost"), ["UNAVAILABLE worker_lost"]),
        (CHECKER.check_call, Reply("UNAVAILABLE", code="changed_meanwhile"), []),
        (CHECKER.check_call, Reply("OK", body=SECRET.encode()), ["another tenant's text"]),
        (check_refused, Reply("OK"), ["OK without a token"]),
        (check_refused, Reply("UNAUTHENTICATED"), []),
        (check_worker_call, Reply("UNKNOWN", code="worker_error"), ["UNKNOWN worker_error"]),
        (check_worker_call, Reply("NOT_FOUND", code="session_not_open"), []),
    ],
)
def test_a_broken_end_of_a_call_is_a_finding(
    check: Callable[[Request, Reply], list[object]], reply: Reply, kinds: list[str]
) -> None:
    found = check(Request("grpc", "CALL", "/x"), reply)
    assert [problem.kind for problem in found] == kinds  # type: ignore[attr-defined]


def test_a_finding_has_a_small_request_which_can_be_sent_again(tmp_path: Path) -> None:
    sent: list[Request] = []

    def send(request: Request) -> Reply:
        sent.append(request)
        broken = b'"tools"' in request.body
        return http(500, b"broken", "text/plain") if broken else http(200, {})

    findings = Findings()
    door = Door("chat", http_requests("chat"), send, CHECKER.check_http)
    attack(door, 1, 100, findings, lambda: True)
    (found,) = findings
    assert found.problem.kind == "an error 500 without JSON"
    assert found.times <= SHRINKS + 1
    broken = [len(request.body) for request in sent if b'"tools"' in request.body]
    assert found.request is not None
    assert len(found.request.body) == min(broken) < broken[0]
    write_findings(findings, tmp_path)
    kept = json.loads((tmp_path / "finding-0.json").read_text(encoding="utf-8"))["request"]
    assert Request.from_described(kept) == found.request
    assert {
        "condition": "run",
        "metric": "kinds of findings",
        "unit": "count",
        "n": 1,
    } in build_rows(findings)


@pytest.mark.parametrize("name", ROUTES)
def test_every_route_of_a_door_is_attacked(name: str) -> None:
    for method, path, _ in ROUTES[name]:
        wanted = method, path
        hypothesis.find(
            http_requests(name),
            lambda sent, wanted=wanted: (sent.method, sent.path) == wanted,  # type: ignore[misc]
        )


def test_requests_that_cannot_be_drawn_are_no_quiet_run() -> None:
    nothing = http_requests("chat").filter(lambda _: False)
    door = Door("chat", nothing, lambda _: http(200, {}), CHECKER.check_http)
    with pytest.raises(Unsatisfiable):
        attack(door, 1, 20, Findings(), lambda: True)


@pytest.mark.parametrize(("busy", "found"), [(2, 0), (10_000, 1)])
def test_a_busy_session_is_deleted_later(busy: int, found: int) -> None:
    """One that stays busy is a finding."""
    tries = iter(range(busy))
    stored = ["s_1"]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"sessions": [{"id": each} for each in stored]})
        if next(tries, None) is not None:
            return httpx.Response(409, json={})
        stored.clear()
        return httpx.Response(204)

    findings = Findings()
    with httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer)) as client:
        delete_all(client, findings, patience=60.0 if not found else 0.5)
    assert len(list(findings)) == found
    assert findings.other["sessions deleted"] == 1 - found


def test_a_turn_may_be_compared_with_another_tenants_session() -> None:
    """The body is valid, so that the comparison itself is attacked."""

    def reaches(body: Any) -> bool:
        try:
            read = TurnBody.model_validate(body)
        except ValidationError:
            return False
        return (read.logprobs.compare_with or "").startswith("@foreign")

    hypothesis.find(bodies.turn, reaches)


def test_the_same_seed_sends_the_same_requests() -> None:
    def requests(seed: int) -> list[Request]:
        sent: list[Request] = []

        def send(request: Request) -> Reply:
            sent.append(request)
            return http(200, {})

        door = Door("responses", http_requests("responses"), send, CHECKER.check_http)
        attack(door, seed, 20, Findings(), lambda: True)
        return sent

    assert requests(1) == requests(1) != requests(2)


def test_another_answer_of_the_neighbour_is_a_finding() -> None:
    conversation = build_conversations(1, 1)[0]
    assert compare(conversation, ["a", "b"], ["a", "b"]) == []
    (problem,) = compare(conversation, ["a", "b"], ["a", "c"])
    assert "turn 2" in problem.seen


def test_errors_in_a_log_are_found(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_text(
        '{"event": "request", "level": "info"}\n{"event": "bad", "level": "error"}\noops\n'
        '{"event": "worker left", "level": "warning"}\n'
    )
    assert [event for event, _ in read_errors(log)] == [
        "bad",
        "a line that is no JSON",
        "worker left",
    ]


def test_json_text_that_no_library_writes() -> None:
    value = {"a": Token("1e400"), "b": Members((("x", 1), ("x", "\ud800")))}
    assert encode_json(value) == b'{"a":1e400,"b":{"x":1,"x":"\\ud800"}}'
    assert b"\xed\xa0\x80" in encode_json(value, escaped=False)


def test_references_become_ids_that_the_service_has_given() -> None:
    world = World()
    world.learn(b'{"id": "s_1"} {"id":"resp_2"}')
    world.add_foreign("s_9")
    assert (
        world.resolve("/@session:0/@response:0/@foreign:0/@item:1") == "/s_1/resp_2/s_9/no-item-1"
    )
