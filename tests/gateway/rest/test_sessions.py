"""REST API of sessions and their memory, over a stub worker."""

import asyncio
from typing import Any

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def test_a_session_is_created_shown_listed_and_deleted(api: Any) -> None:
    body = {
        "budget": 100,
        "research": {
            "repair_rows": 10,
            "method": "snapkv",
            "method_settings": {"window": 8},
            "layer_budgets": "pyramid",
            "episodes": None,
            "repair_on": ["last_output", "turn"],
            "repair_settings": {"select": "spread", "contrast": 1.0, "swap": False},
            "repair_seconds": 0.5,
            "reselect": {"every": 8},
            "prefill": {"attend": "active", "sparse": "auto", "alpha": 0.98},
            "retrieve": {"share": 0.25, "choice": "sample", "index": "auto"},
        },
        "seed": 7,
        "tools": [TOOL],
        "metadata": {"user": "ann"},
        "model": "scripted",
    }
    created = await api.http.post("/v1/sessions", json=body)
    assert created.status_code == 201
    view = created.json()
    assert {name: view[name] for name in body} == body
    assert view["recall"]
    assert (view["state"], view["turns"], view["length"], view["pending_calls"]) == (
        "idle",
        0,
        0,
        [],
    )
    assert (await api.http.get(f"/v1/sessions/{view['id']}")).json() == view
    assert (await api.http.get("/v1/sessions")).json() == {
        "sessions": [view],
        "next_cursor": None,
        "scanned": 1,
        "truncated": False,
    }
    deleted = await api.http.delete(f"/v1/sessions/{view['id']}")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert (await api.http.get(f"/v1/sessions/{view['id']}")).status_code == 404
    assert (await api.http.delete(f"/v1/sessions/{view['id']}")).status_code == 404


async def test_omitted_settings_get_defaults(api: Any) -> None:
    view = (await api.http.post("/v1/sessions", json={})).json()
    assert (view["recall"], view["budget"]) == (True, "auto")
    research = view["research"]
    assert (research["method"], research["repair_rows"]) == ("icecache", 0)
    assert research["repair_on"] == ["tool_call", "tool_delta", "tool_result"]
    assert (research["repair_settings"], research["repair_seconds"]) == ({}, None)
    assert research["prefill"] == {}
    assert research["retrieve"] == {}


async def test_pages_list_all_sessions(api: Any) -> None:
    made = [await api.session() for _ in range(5)]
    seen = []
    query = {"limit": 2}
    while True:
        page = (await api.http.get("/v1/sessions", params=query)).json()
        seen += [session["id"] for session in page["sessions"]]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert seen == made[::-1]


async def test_memory_reports_every_layer(api: Any) -> None:
    session = await api.session()
    await api.turn(session)
    memory = (await api.http.get(f"/v1/sessions/{session}/memory")).json()
    assert memory["session"] == session
    assert (memory["layer_active_rows"], memory["layer_bound_rows"]) == ([3, 2], [96, 96])
    assert (memory["active_rows"], memory["in_slot"]) == (3, True)


async def test_writes_with_a_key_happen_once(api: Any) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = await api.http.post("/v1/sessions", json={"budget": 64}, headers=headers)
    again = await api.http.post("/v1/sessions", json={"budget": 64}, headers=headers)
    assert again.json() == first.json()
    session = first.json()["id"]
    url = f"/v1/sessions/{session}/turns"
    body = {"messages": [{"role": "user", "content": "hello"}]}
    api.worker.script = ["one", "two"]
    turns = [await api.http.post(url, json=body, headers=headers) for _ in range(2)]
    assert turns[0].json() == turns[1].json()
    other = await api.http.post(url, json={**body, "generate": False}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
    assert (await api.catalog.sessions.get(session)).turns == 1
    deleted = [await api.http.delete(f"/v1/sessions/{session}", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in deleted] == [204, 204]


async def test_two_creations_at_once_with_one_key_make_one_session(api: Any) -> None:
    headers = {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(
        *[api.http.post("/v1/sessions", json={}, headers=headers) for _ in range(4)]
    )
    assert len({answer.json()["id"] for answer in answers}) == 1


async def test_a_session_shows_the_name_of_its_memory(api: Any) -> None:
    created = await api.http.post("/v1/sessions", json={"remember": "ann"})
    assert created.json()["remember"] == "ann"
    assert (await api.http.post("/v1/sessions", json={})).json()["remember"] is None


async def test_the_full_cache_has_no_memory(api: Any) -> None:
    answer = await api.http.post("/v1/sessions", json={"recall": False, "remember": "ann"})
    assert answer.status_code == 422
    assert answer.json()["code"] == "bad_settings"
    assert "remember" in answer.json()["detail"]
