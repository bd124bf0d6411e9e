"""No route and no reference in a body gives a tenant anything of another's."""

import itertools
import re
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.adversary.conftest import Tenant, text_of

SECRET = "zebra 4711"
# A stranger is told that there is no such thing, or that the request is wrong in itself.
DENIED = {400, 401, 403, 404, 405, 409, 422}
# Each route that takes a body takes one of them.
BODIES: tuple[dict[str, Any] | None, ...] = (
    {},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    {"metadata": {"a": "b"}},
    {"items": [{"type": "message", "role": "user", "content": "x"}]},
    {"type": "tool_call.started", "call_id": "c1"},
)
# What the reference in a valid body is told.
NOTHING = re.compile(r"there is no (session|conversation|item|message) '|id '\S+' not found")
# They are there for Ann, before and after the attacks.
OWN = (
    "/v1/sessions/{session}",
    "/v1/sessions/{chat_session}",
    "/v1/responses/{response}",
    "/v1/conversations/{conversation}/items/{item}",
)
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


@pytest.fixture(scope="module")
def owned(tenants: dict[str, Tenant]) -> dict[str, str]:
    """Ann's session, chat, response, message and conversation, all with the secret, by kind."""
    ann = tenants["ann"]

    def post(path: str, **body: Any) -> Any:
        return ann.http.post(path, json=body).raise_for_status().json()

    session = post("/v1/sessions", budget=256, metadata={"k": SECRET})["id"]
    said = [{"role": "user", "content": SECRET}]
    post(f"/v1/sessions/{session}/turns", messages=said, max_tokens=4)
    response = post("/v1/responses", model=ann.model, input=SECRET, max_output_tokens=4)
    item = {"type": "message", "role": "user", "content": SECRET}
    conversation = post("/v1/conversations", items=[item])["id"]
    items = ann.http.get(f"/v1/conversations/{conversation}/items").json()["data"]
    message = post("/v1/messages", model=ann.model, max_tokens=4, messages=said)
    chat = ann.ask(said)
    return {
        "session": session,
        "chat_session": chat.headers["kvrecall-session"],
        "response": response["id"],
        "response_item": response["output"][0]["id"],
        "conversation": conversation,
        "item": items[0]["id"],
        "message": message["id"],
        "answer": text_of(chat),
    }


def fill(path: str, owned: dict[str, str]) -> list[str]:
    """The path with every combination of Ann's ids that its parameters may have."""
    values = {
        "session": ["session", "chat_session"],
        "response": ["response"],
        "conversation": ["conversation"],
        "item": ["item", "response_item"],
    }
    choices = [[owned[kind] for kind in values[name]] for name in _PARAMETER.findall(path)]
    filled = []
    for chosen in itertools.product(*choices):
        each = path
        for value in chosen:
            each = _PARAMETER.sub(value, each, count=1)
        filled.append(each)
    return filled


def ask(tenant: Tenant, method: str, path: str, body: Any) -> tuple[int, str]:
    """The status and the beginning of the body; an endless stream is left after its first part."""
    with tenant.http.stream(method, path, json=body) as reply:
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            return reply.status_code, ""
        return reply.status_code, reply.read().decode()


def test_every_route_denies_another_tenants_ids(
    mallory: Tenant, ann: Tenant, owned: dict[str, str]
) -> None:
    """Whatever the method and the body; a request that is valid for an id of its own finds nothing."""
    asked = 0
    paths = mallory.http.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        if "model" in _PARAMETER.findall(path) or not _PARAMETER.findall(path):
            continue
        for method in operations.keys() & {"get", "post", "delete", "put", "patch"}:
            bodies = (None,) if method in ("get", "delete") else BODIES
            for filled in fill(path, owned):
                statuses = []
                for body in bodies:
                    status, text = ask(mallory, method.upper(), filled, body)
                    statuses.append(status)
                    assert status in DENIED, (method, filled, body, status, text[:300])
                    assert SECRET not in text
                asked += len(statuses)
                assert 404 in statuses, (method, filled, statuses)
    assert asked > 60
    for path in OWN:
        ann.http.get(path.format(**owned)).raise_for_status()


def test_no_reference_in_a_body_reaches_another_tenants_conversation(
    mallory: Tenant, owned: dict[str, str]
) -> None:
    own = mallory.http.post("/v1/sessions", json={"budget": 256}).json()["id"]
    said = [{"role": "user", "content": "x"}]
    references: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": "x", "previous_response_id": owned["response"]}),
        ("/v1/responses", {"input": "x", "conversation": owned["conversation"]}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": owned["item"]}]}),
        ("/v1/responses/input_tokens", {"input": "x", "conversation": owned["conversation"]}),
        ("/v1/chat/completions", {"messages": said, "kvrecall": {"session": owned["session"]}}),
        (
            "/v1/messages",
            {
                "messages": said,
                "max_tokens": 4,
                "thread": {"type": "continue", "previous_message_id": owned["message"]},
            },
        ),
        (
            f"/v1/sessions/{own}/turns",
            {"messages": said, "max_tokens": 2, "logprobs": {"compare_with": owned["session"]}},
        ),
    ]
    for path, body in references:
        model = {} if "sessions" in path or "conversations" in path else {"model": mallory.model}
        reply = mallory.http.post(path, json={**model, **body})
        assert reply.status_code in (400, 404, 422), (path, body, reply.status_code, reply.text)
        assert NOTHING.search(reply.text), (path, body, reply.text)
        assert SECRET not in reply.text


def test_an_item_is_not_found_through_a_conversation_of_another_tenant(
    mallory: Tenant, owned: dict[str, str]
) -> None:
    own = mallory.http.post("/v1/conversations", json={}).raise_for_status().json()["id"]
    for item in (owned["item"], owned["response_item"]):
        for method in ("GET", "DELETE"):
            reply = mallory.http.request(method, f"/v1/conversations/{own}/items/{item}")
            assert reply.status_code == 404, (method, item, reply.text)
            assert SECRET not in reply.text


def test_another_tenants_history_and_key_find_nothing(
    ann: Tenant, mallory: Tenant, owned: dict[str, str]
) -> None:
    """Neither the same messages, nor the same Idempotency-Key, nor a header that names the tenant."""
    history = [
        {"role": "user", "content": SECRET},
        {"role": "assistant", "content": owned["answer"]},
        {"role": "user", "content": "more"},
    ]
    reply = mallory.ask(history)
    assert reply.headers["kvrecall-match"] not in ("continued", "forked")
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    key = {"Idempotency-Key": uuid4().hex}
    body = {"model": ann.model, "messages": history[:1], "max_tokens": 4}
    replies = [
        each.http.post("/v1/chat/completions", json=body, headers=key) for each in (ann, mallory)
    ]
    first, second = (each.headers["kvrecall-session"] for each in replies)
    assert first != second
    named = {"x-kvrecall-tenant": "ann", "kvrecall-tenant": "ann"}
    assert mallory.http.get(f"/v1/sessions/{owned['session']}", headers=named).status_code == 404


def test_a_tenant_lists_its_own_alone(ann: Tenant, mallory: Tenant, owned: dict[str, str]) -> None:
    assert owned["session"] in ann.sessions()
    assert not set(ann.sessions()) & set(mallory.sessions())
    found: httpx.Response = mallory.http.get("/v1/sessions", params={"limit": 100})
    assert SECRET not in found.text
