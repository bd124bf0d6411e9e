"""Stored responses: read again, paged through what led to them, deleted."""

from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb

Json = dict[str, Any]
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
CALL = pb.ToolCall(id="c1", name="f", arguments='{"n": 1}')
TURNS = 40


async def get(api: Any, path: str, **params: Any) -> Json:
    response = await api.http.get(f"/v1/responses/{path}", params=params)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def said(item: Json) -> str:
    """The text of an item of any kind."""
    if item["type"] == "message":
        return "".join(part["text"] for part in item["content"])
    return str(item.get("output", item.get("name")))


async def test_a_response_is_read_as_it_was_answered_after_a_restart_too(api, answer) -> None:
    first = await answer("hello", metadata={"a": "b"})
    assert await get(api, first["id"]) == first
    refused = await api.http.get(f"/v1/responses/{first['id']}", params={"stream": True})
    assert refused.json()["error"]["param"] == "stream"


async def test_the_input_of_a_chain_is_its_conversation_without_instructions(api, answer) -> None:
    api.worker.script = [[CALL], "two", "three"]
    options: Json = {"instructions": "be kind", "tools": TOOLS}
    first = await answer("hello", **options)
    result = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    second = await answer([result], previous_response_id=first["id"], **options)
    third = await answer(
        [{"role": "user", "content": "more"}], previous_response_id=second["id"], **options
    )
    page = await get(api, f"{third['id']}/input_items", order="asc")
    assert [said(item) for item in page["data"]] == ["hello", "f", "1", "two", "more"]
    assert [item["type"] for item in page["data"][:3]] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    assert (page["object"], page["has_more"]) == ("list", False)
    answered = [first["output"][0]["id"], second["output"][0]["id"]]
    assert [page["data"][1]["id"], page["data"][3]["id"]] == answered
    assert [said(each) for each in (await get(api, f"{first['id']}/input_items"))["data"]] == [
        "hello"
    ]


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_long_input_is_read_in_pages(api, answer, order: str) -> None:
    api.worker.script = [f"answer {number}" for number in range(TURNS)]
    last = await answer("question 0")
    for number in range(1, TURNS):
        last = await answer(f"question {number}", previous_response_id=last["id"])
    items: list[Json] = []
    after: Json = {}
    while True:
        path = f"{last['id']}/input_items"
        page = await get(api, path, limit=7, order=order, **after)
        assert page["first_id"] == page["data"][0]["id"]
        items += page["data"]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    expected = [f"{side} {number}" for number in range(TURNS) for side in ("question", "answer")][
        :-1
    ]
    assert [said(item) for item in items] == (expected if order == "asc" else expected[::-1])
    assert len({item["id"] for item in items}) == len(items)


async def test_an_input_has_no_item_of_another_response(api, answer) -> None:
    first = await answer("hello")
    other = await answer("another")
    for after in ("msg_1", other["output"][0]["id"], first["output"][0]["id"]):
        path = f"/v1/responses/{first['id']}/input_items"
        refused = await api.http.get(path, params={"after": after})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


async def test_a_deleted_response_is_gone_and_those_after_it_are_not(api, answer, ask) -> None:
    first = await answer("hello")
    second = await answer("more", previous_response_id=first["id"])
    url = f"/v1/responses/{first['id']}"
    deleted = (await api.http.delete(url)).json()
    assert deleted == {"id": first["id"], "object": "response", "deleted": True}
    assert (await api.http.get(url)).status_code == 404
    assert (await api.http.delete(url)).status_code == 404
    refused = await ask("again", previous_response_id=first["id"])
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    third = await ask("more", previous_response_id=second["id"])
    assert third.headers["kvrecall-match"] == "continued"
    items = (await get(api, f"{second['id']}/input_items"))["data"]
    assert [said(item) for item in items] == ["more", "ok", "hello"]


async def test_a_response_goes_with_its_session(api, ask) -> None:
    first = await ask("hello")
    await api.http.delete(f"/v1/sessions/{first.headers['kvrecall-session']}")
    assert (await api.http.get(f"/v1/responses/{first.json()['id']}")).status_code == 404
    refused = await ask("more", previous_response_id=first.json()["id"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


async def test_a_response_that_is_not_in_the_background_is_not_cancelled(api, answer) -> None:
    first = await answer("hello")
    refused = await api.http.post(f"/v1/responses/{first['id']}/cancel")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_id")
