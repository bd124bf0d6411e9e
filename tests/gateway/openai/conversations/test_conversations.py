"""Conversations: items that are added by hand and by answers, one answer at a time."""

import asyncio
from typing import Any

import httpx
import pytest

from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "1"}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_a_conversation_is_created_changed_and_deleted(api, call) -> None:
    created = await call("POST", "", metadata={"topic": "a"}, items=[user("hello")])
    id = created["id"]
    assert id.startswith("conv_")
    assert (created["object"], created["metadata"]) == ("conversation", {"topic": "a"})
    assert await call("GET", f"/{id}") == created
    changed = await call("POST", f"/{id}", metadata={"topic": "b"})
    assert changed == {**created, "metadata": {"topic": "b"}}
    deleted = await call("DELETE", f"/{id}")
    assert deleted == {"id": id, "object": "conversation.deleted", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/m")):
        answer = await api.http.request(method, f"/v1/conversations/{id}{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "conversation_not_found"


async def test_items_are_added_listed_in_pages_and_deleted_by_their_ids(call) -> None:
    id = (await call("POST", ""))["id"]
    reasoning: Json = {"type": "reasoning", "summary": [], "content": None, "id": "rs_1"}
    texts = [{"type": "input_text", "text": "d"}, {"type": "input_text", "text": "e"}]
    said = [user("a"), CALL, RESULT, reasoning, {"role": "user", "content": texts}]
    added = (await call("POST", f"/{id}/items", items=said))["data"]
    assert [item["type"] for item in added] == [
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "message",
    ]
    assert added[0]["content"] == [{"type": "input_text", "text": "a"}]
    assert {item.get("status", "completed") for item in added} == {"completed"}
    first = await call("GET", f"/{id}/items?limit=2")
    assert first["data"] == added[:2:-1]
    assert (first["has_more"], first["last_id"]) == (True, added[3]["id"])
    rest = await call("GET", f"/{id}/items?after={first['last_id']}")
    assert (rest["data"], rest["has_more"]) == (added[2::-1], False)
    item = added[1]["id"]
    assert await call("GET", f"/{id}/items/{item}") == added[1]
    assert (await call("DELETE", f"/{id}/items/{item}"))["id"] == id
    page = await call("GET", f"/{id}/items?order=asc")
    assert [each["id"] for each in page["data"]] == [
        each["id"] for each in added if each != added[1]
    ]


async def test_an_answer_reads_the_items_and_adds_its_own(api, call, ask, read) -> None:
    api.worker.script = ["one", "two", "three"]
    id = (await call("POST", "", items=[user("a")]))["id"]
    first = await ask(id, "b")
    assert first.json()["conversation"] == {"id": id}
    assert await read(id) == ["a", "b", "one"]
    second = await ask(id, "c")
    assert second.headers["kvrecall-match"] == "continued"
    assert second.headers["kvrecall-session"] == first.headers["kvrecall-session"]
    page = await call("GET", f"/{id}/items?order=asc")
    assert page["data"][2] == first.json()["output"][0]
    await call("POST", f"/{id}/items", items=[user("d")])
    third = await ask(id, [], stream=True)
    assert third.headers["kvrecall-match"] == "continued"
    assert await read(id) == ["a", "b", "one", "c", "two", "d", "three"]


async def test_a_call_and_its_result_go_through_a_conversation(api, call, ask, read) -> None:
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")], "done"]
    tools = [{"type": "function", "name": "f"}]
    id = (await call("POST", ""))["id"]
    await ask(id, "a", tools=tools)
    second = await ask(id, [RESULT], tools=tools)
    assert second.headers["kvrecall-match"] == "continued"
    assert await read(id) == ["a", "f", "1", "done"]


async def test_without_an_item_the_conversation_is_another(api, call, ask, read) -> None:
    api.worker.script = ["one", "two", "three"]
    id = (await call("POST", ""))["id"]
    await ask(id, "a")
    await ask(id, "b")
    page = await call("GET", f"/{id}/items")
    for item in page["data"][:2]:
        await call("DELETE", f"/{id}/items/{item['id']}")
    third = await ask(id, "c")
    assert third.headers["kvrecall-match"] == "forked"
    assert await read(id) == ["a", "one", "c", "three"]


async def test_a_conversation_goes_on_when_its_session_is_gone(api, call, ask, read) -> None:
    id = (await call("POST", ""))["id"]
    first = await ask(id, "a")
    await api.http.delete(f"/v1/sessions/{first.headers['kvrecall-session']}")
    second = await ask(id, "b", store=False)
    assert second.headers["kvrecall-match"] == "built"
    assert await read(id) == ["a", "ok", "b", "ok"]


async def test_an_answer_that_fails_adds_nothing(api, call, ask, read) -> None:
    id = (await call("POST", ""))["id"]
    refused = await ask(id, [user("a"), {"role": "user", "content": [{"type": "hologram"}]}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "input[1].content[0].type",
    )
    assert await read(id) == []
    assert (await ask(id, "a")).status_code == 200, "the claim was released"


async def test_a_repeated_request_adds_its_items_once(api, call, read) -> None:
    id = (await call("POST", ""))["id"]
    body = {"model": api.service.info.model, "input": "a", "conversation": {"id": id}}
    headers = {"Idempotency-Key": "retry-1"}
    for _ in range(2):
        answer = await api.http.post("/v1/responses", json=body, headers=headers)
        assert answer.status_code == 200
    assert await read(id) == ["a", "ok"]


async def test_no_tenant_finds_the_conversation_of_another(api, call, ask) -> None:
    created = await call("POST", "", items=[user("a")])
    (item,) = (await call("GET", f"/{created['id']}/items"))["data"]
    headers = {"X-Kvrecall-Tenant": "ann"}
    for id in (created["id"], "conv_0"):
        for method, path, body in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [user("b")]}),
            ("GET", f"/items/{item['id']}", None),
            ("DELETE", f"/items/{item['id']}", None),
        ):
            url = f"/v1/conversations/{id}{path}"
            answer = await api.http.request(method, url, json=body, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "conversation_not_found")
        body = {"model": api.service.info.model, "input": "b", "conversation": id}
        answer = await api.http.post("/v1/responses", json=body, headers=headers)
        assert answer.json()["error"]["code"] == "conversation_not_found"
    assert len((await call("GET", f"/{created['id']}/items"))["data"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        ("", {"items": [{"type": "image"}]}, "items[0].type"),
        ("/items", {"items": []}, "items"),
        ("/items", {"items": [user("a"), {"role": "robot", "content": "a"}]}, "items[1].role"),
        ("/items", {"items": [{"role": "user", "content": [{}]}]}, "items[0].content[0].type"),
        ("/items", {"items": [{"type": "function_call", "name": "f"}]}, "items[0].call_id"),
    ],
)
async def test_a_bad_item_is_refused_by_its_place(
    api, call, path: str, body: Json, param: str
) -> None:
    id = (await call("POST", ""))["id"] if path else ""
    url = f"/v1/conversations/{id}{path}".removesuffix("/")
    response = await api.http.post(url, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    for after in ("?after=msg_0", "?limit=0", "?order=up"):
        id = id or (await call("POST", ""))["id"]
        listed = await api.http.get(f"/v1/conversations/{id}/items{after}")
        assert (listed.status_code, listed.json()["error"]["code"]) == (400, "invalid_value")


class TestWithLimits:
    """A service with few conversations, few items, and little patience."""

    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(
            tenant_conversations=2,
            max_conversation_items=3,
            max_conversation_bytes=1024,
            queue_seconds=0.2,
            claim_seconds=0.1,
        )

    async def test_what_is_over_the_limits_is_refused(self, api, call, ask, read) -> None:
        ids = [(await call("POST", ""))["id"] for _ in range(2)]
        refused = await api.http.post("/v1/conversations")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        await call("POST", f"/{ids[0]}/items", items=[user("a"), user("b")])
        url = f"/v1/conversations/{ids[0]}/items"
        refused = await api.http.post(url, json={"items": [user("c"), user("d")]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")
        refused = await ask(ids[0], "c")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "conversation")
        assert await read(ids[0]) == ["a", "b"]

    async def test_items_over_the_bounds_are_refused_by_their_member(
        self, api, call, ask, read
    ) -> None:
        for items in ([user("a")] * 4, [user("ä" * 500)], [user("a" * 450)] * 2):
            refused = await api.http.post("/v1/conversations", json={"items": items})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "items")
            assert error["code"] == "limit_exceeded"
        id = (await call("POST", "", items=[user("a" * 450)]))["id"]
        refused = await api.http.post(
            f"/v1/conversations/{id}/items", json={"items": [user("b" * 450)]}
        )
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")
        refused = await ask(id, "c" * 450)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "conversation")
        assert (await ask(id, "d")).status_code == 200
        assert await read(id) == ["a" * 450, "d", "ok"]

    async def test_items_that_are_named_are_read_up_to_the_bound(self, api, ask) -> None:
        body = {"model": api.service.info.model, "input": "a" * 300}
        first = (await api.http.post("/v1/responses", json=body)).json()
        (item,) = (await api.http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
        reference = {"type": "item_reference", "id": item["id"]}
        for count, status in ((1, 200), (3, 400)):
            body["input"] = [reference] * count
            answer = await api.http.post("/v1/responses", json=body)
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "input[2]"

    async def test_a_second_answer_that_waited_too_long_is_told_to_come_again(
        self, api, call, ask, read
    ) -> None:
        id = (await call("POST", ""))["id"]
        api.worker.gates["token"] = asyncio.Event()
        first = asyncio.create_task(ask(id, "a"))
        await api.worker.reached["token"].wait()
        refused: httpx.Response = await ask(id, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy")
        assert refused.headers["Retry-After"] == "1"
        api.worker.gates["token"].set()
        await first
        assert await read(id) == ["a", "ok"]


async def test_answers_of_one_conversation_wait_for_one_another(api, call, ask, read) -> None:
    id = (await call("POST", ""))["id"]
    api.worker.gates["token"] = asyncio.Event()
    first = asyncio.create_task(ask(id, "a"))
    await api.worker.reached["token"].wait()
    second = asyncio.create_task(ask(id, "c"))
    await asyncio.sleep(0.05)
    api.worker.gates["token"].set()
    found = [await first, await second]
    assert [each.headers["kvrecall-match"] for each in found] == ["built", "continued"]
    assert await read(id) == ["a", "ok", "c", "ok"]


async def test_writes_that_are_repeated_under_their_key_are_made_once(api) -> None:
    key = {"Idempotency-Key": "one"}
    body = {"metadata": {"a": "b"}, "items": [{"role": "user", "content": "hello"}]}
    made = await asyncio.gather(
        *(api.http.post("/v1/conversations", json=body, headers=key) for _ in range(4))
    )
    first = made[0].json()
    assert [(each.status_code, each.json()) for each in made] == [(200, first)] * 4
    items = f"/v1/conversations/{first['id']}/items"
    more = {"items": [{"role": "user", "content": "more"}]}
    added = await asyncio.gather(*(api.http.post(items, json=more, headers=key) for _ in range(4)))
    assert [(each.status_code, each.json()) for each in added] == [(200, added[0].json())] * 4
    listed = (await api.http.get(items, params={"order": "asc"})).json()["data"]
    assert [item["content"][0]["text"] for item in listed] == ["hello", "more"]
    other = await api.http.post("/v1/conversations", json={}, headers=key)
    assert other.json()["error"]["code"] == "idempotency_conflict"
    unkeyed = (await api.http.post("/v1/conversations", json=body)).json()
    assert unkeyed["id"] != first["id"]
