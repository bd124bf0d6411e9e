"""REST API of sessions, turns, events and memory, over a stub worker."""

import asyncio
from collections.abc import Callable

import pytest

from kvrecall.protocol.v1 import worker_pb2 as wire

CALL = wire.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')
OPENAI_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def test_a_session_is_created_shown_listed_and_deleted(api) -> None:
    body = {
        "budget": 100,
        "repair_rows": 10,
        "method": "full",
        "method_settings": {"window": 8},
        "layer_budgets": "pyramid",
        "episodes": None,
        "repair_on": ["last_output", "turn"],
        "repair_scan": "exact",
        "repair_settings": {"hops": 2},
        "repair_seconds": 0.5,
        "seed": 7,
        "tools": [TOOL],
        "metadata": {"user": "ann"},
        "model": "scripted",
    }
    created = await api.http.post("/v1/sessions", json=body)
    assert created.status_code == 201
    view = created.json()
    assert {name: view[name] for name in body} == body
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
    }
    deleted = await api.http.delete(f"/v1/sessions/{view['id']}")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert (await api.http.get(f"/v1/sessions/{view['id']}")).status_code == 404
    assert (await api.http.delete(f"/v1/sessions/{view['id']}")).status_code == 404


async def test_omitted_settings_get_defaults(api) -> None:
    view = (await api.http.post("/v1/sessions", json={})).json()
    assert (view["budget"], view["repair_rows"], view["method"]) == (256, 64, "snapkv")
    assert view["repair_on"] == ["tool_call", "tool_delta", "tool_result"]
    assert (view["repair_scan"], view["repair_settings"], view["repair_seconds"]) == (
        None,
        {},
        None,
    )


@pytest.mark.parametrize(
    ("body", "episodes"),
    [
        ({}, None),
        ({"method": "epicache", "episodes": None}, None),
        ({"method": "epicache"}, {}),
        ({"method": "epicache", "episodes": {}}, {}),
        (
            {"method": "epicache", "episodes": {"count": "auto", "build": "per_episode"}},
            {"count": "auto", "build": "per_episode"},
        ),
        (
            {"method": "epicache", "episodes": {"segment_utterances": 2, "rebuild_growth": 1}},
            {"segment_utterances": 2, "rebuild_growth": 1.0},
        ),
    ],
)
async def test_methods_with_episodes_enable_them_unless_disabled(
    api, body: dict, episodes: dict | None
) -> None:
    default = {
        "count": 4,
        "segment_utterances": 4,
        "medoid_utterances": 8,
        "build": "one_pass",
        "rebuild_growth": 0.25,
    }
    view = (await api.http.post("/v1/sessions", json=body)).json()
    assert view["episodes"] == (None if episodes is None else default | episodes)
    assert view["layer_budgets"] is None


async def test_episodes_are_listed_with_size_medoid_and_matched_turns(
    api,
) -> None:
    settings = {"count": 2, "segment_utterances": 2, "medoid_utterances": 2, "rebuild_growth": 9}
    session = await api.session(method="epicache", budget=16, repair_rows=0, episodes=settings)
    url = f"/v1/sessions/{session}/episodes"
    empty = (await api.http.get(url)).json()
    assert (empty["session"], empty["segments"], empty["builds"], empty["episodes"]) == (
        session,
        0,
        0,
        [],
    )
    assert empty["settings"] == settings | {"build": "one_pass"}
    for text in ("kettle leaves cup", "station rails ticket") * 2:
        api.worker.script = [text]
        assert (await api.turn(session, text)).json()["episode"] is None
        await wait_until_idle(session)
    turn = (await api.turn(session, "a ticket for the station")).json()
    assert turn["seconds"]["match"] >= 0
    similarity = turn["episode"].pop("similarity")
    assert 0 < similarity < 1
    moved = {"rows_moved": 20, "rows_kept": 80, "bytes_moved": 1280, "seconds": 0.01}
    assert turn["episode"] == {"episode": "1-2", "switched": True, **moved}
    await wait_until_idle(session)
    found = (await api.http.get(url)).json()
    assert (found["segments"], found["built_segments"], found["builds"]) == (5, 4, 1)
    tea = {"id": "1-1", "active": False, "segments": 2, "tokens": 14, "matched": 0}
    trains = {"id": "1-2", "active": True, "segments": 3, "tokens": 21, "matched": 1}
    tea["medoid"], trains["medoid"] = (
        f"user: {text}\nassistant: {text}" for text in ("kettle leaves cup", "station rails ticket")
    )
    assert found["episodes"] == [tea, trains]
    assert (await api.http.get("/v1/sessions/nobody/episodes")).status_code == 404


async def wait_until_idle(session: str) -> None:
    """Wait for the background tasks of a session."""
    for task in asyncio.all_tasks():
        if task.get_name() == f"rest of {session}":
            await task


async def test_pages_list_all_sessions(api) -> None:
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


async def test_a_turn_returns_the_reply_usage_and_memory(api) -> None:
    session = await api.session()
    api.worker.script = ["it rains"]
    answer = await api.turn(session)
    assert answer.status_code == 200
    turn = answer.json()
    assert turn.pop("seconds").keys() == {"waiting", "prefill", "decode"}
    assert turn == {
        "session": session,
        "turn": 1,
        "message": {"role": "assistant", "content": "it rains", "tool_calls": None},
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 2, "output_tokens": 2},
        "memory": {
            "length": 4,
            "budget": 64,
            "active_rows": 4,
            "peak_rows": 6,
            "bound_rows": 96,
            "active_bytes": 256,
            "evicted_rows": 0,
            "promoted_rows": 0,
            "tier_bytes": {"ram": 256},
            "repair": {
                "repairs": 0,
                "signals": [],
                "scored_rows": 0,
                "promoted": 0,
                "demoted": 0,
                "seconds": 0,
                "truncated": 0,
                "skipped": 0,
            },
            "repairs": [],
        },
        "fidelity": None,
        "episode": None,
        "durable": True,
    }


async def test_a_turn_can_append_without_generating(api) -> None:
    session = await api.session()
    turn = (await api.turn(session, generate=False)).json()
    assert (turn["message"], turn["finish_reason"]) == (None, "appended")


async def test_sampling_parameters_reach_the_worker_unchanged(api) -> None:
    session = await api.session()
    seen = []
    worker_turn = api.worker.turn
    api.worker.turn = lambda request: seen.append(request.sampling) or worker_turn(request)
    sampling = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "seed": 5,
        "stop": ["\n"],
    }
    await api.turn(session, **sampling)
    await api.turn(session)
    expected = wire.Sampling(
        max_tokens=3, temperature=0.5, top_p=0.25, top_k=4, seed=5, stop=["\n"]
    )
    assert seen == [expected, wire.Sampling(max_tokens=50, seed=3)]


async def test_fidelity_is_measured_against_saved_logprobs(api) -> None:
    saved = await api.session()
    compared = await api.session()
    requests = []
    worker_turn = api.worker.turn
    api.worker.turn = lambda request: requests.append(request) or worker_turn(request)
    assert (await api.turn(saved, logprobs={"save": True})).json()["fidelity"] is None
    turn = (await api.turn(compared, logprobs={"compare_with": saved})).json()
    assert turn["fidelity"] == {"tokens": 5, "kl_mean": 0.5, "top1_agreement": 0.8}
    assert [request.keep_distribution for request in requests] == [True, False]
    assert requests[1].compare_with == saved


async def test_a_tool_call_pauses_and_its_result_resumes(api) -> None:
    session = await api.session(tools=[TOOL])
    api.worker.script = [[CALL], "take an umbrella"]
    asked = (await api.turn(session)).json()
    assert asked["finish_reason"] == "tool_calls"
    assert asked["message"] == {"role": "assistant", "content": None, "tool_calls": [OPENAI_CALL]}
    view = (await api.http.get(f"/v1/sessions/{session}")).json()
    assert view["state"] in ("paused", "repairing")
    pending = {"id": "c1", "name": "weather", "arguments": '{"city": "Bern"}', "status": "pending"}
    assert view["pending_calls"] == [pending]

    url = f"/v1/sessions/{session}/events"
    started = (await api.http.post(url, json={"type": "tool_call.started", "call_id": "c1"})).json()
    assert (started["status"], started["outstanding"]) == ("pending", ["c1"])
    await api.http.post(url, json={"type": "tool_call.delta", "call_id": "c1", "delta": "ra"})
    event = {"type": "tool_call.completed", "call_id": "c1", "result": "rain"}
    done = (await api.http.post(url, json=event)).json()
    assert (done["session"], done["type"], done["status"]) == (
        session,
        "tool_call.completed",
        "completed",
    )
    assert done["outstanding"] == []

    waiting = {"wait_for_repairs": True}
    resumed = (await api.http.post(f"/v1/sessions/{session}/turns", json=waiting)).json()
    assert resumed["message"]["content"] == "take an umbrella"
    assert [repair["trigger"] for repair in resumed["memory"]["repairs"]] == [
        "tool_call",
        "tool_result",
    ]
    first = resumed["memory"]["repairs"][0]
    assert first.pop("in_pause") in (True, False)
    assert first == {
        "trigger": "tool_call",
        "signal_tokens": 3,
        "candidates": 8,
        "scored_rows": 8,
        "share_scanned": 1.0,
        "promoted": 2,
        "demoted": 1,
        "seconds": 0.5,
        "truncated": False,
        "hops": 1,
        "bytes_read": 640,
    }
    assert resumed["memory"]["repair"] == {
        "repairs": 2,
        "signals": ["tool_call", "tool_result"],
        "scored_rows": 16,
        "promoted": 4,
        "demoted": 2,
        "seconds": 1.0,
        "truncated": 0,
        "skipped": 0,
    }
    assert (await api.http.get(f"/v1/sessions/{session}")).json()["state"] == "idle"


async def test_an_early_turn_reports_the_share_scanned(api) -> None:
    session = await api.session()
    api.worker.script = [[CALL]]
    api.worker.gates["repair"] = asyncio.Event()
    await api.turn(session)
    await api.worker.reached["repair"].wait()
    event = {"type": "tool_call.completed", "call_id": "c1", "result": "rain"}
    await api.http.post(f"/v1/sessions/{session}/events", json=event)
    memory = (await api.http.post(f"/v1/sessions/{session}/turns", json={})).json()["memory"]
    assert [
        (each["truncated"], each["share_scanned"], each["in_pause"]) for each in memory["repairs"]
    ] == [(True, 0.5, False)]
    assert (memory["repair"]["truncated"], memory["repair"]["skipped"]) == (1, 1)


async def test_a_turn_can_request_a_repair_before_its_prefill(api) -> None:
    session = await api.session()
    memory = (await api.turn(session, repair=True)).json()["memory"]
    assert [repair["trigger"] for repair in memory["repairs"]] == ["turn"]
    other = await api.session(repair_rows=0)
    refused = await api.turn(other, repair=True)
    assert (refused.status_code, refused.json()["field"]) == (422, "repair")


async def test_repairs_are_listed_with_the_promoted_text(api) -> None:
    session = await api.session()
    await api.turn(session, "one two three four", repair=True)
    url = f"/v1/sessions/{session}/repairs"
    (repair,) = (await api.http.get(url)).json()["repairs"]
    assert (repair["number"], repair["turn"], repair["trigger"], repair["signal"]) == (
        1,
        1,
        "turn",
        "one two three four",
    )
    assert repair["passages"] == [
        {"start": 0, "stop": 2, "before": "", "promoted": "user one", "after": "two three four ok"},
        {"start": 3, "stop": 4, "before": "user one two", "promoted": "three", "after": "four ok"},
    ]
    await api.turn(session, "more", repair=True)
    newest = (await api.http.get(url, params={"limit": 1})).json()["repairs"]
    assert [repair["number"] for repair in newest] == [2]
    assert (await api.http.get("/v1/sessions/nobody/repairs")).status_code == 404
    assert (await api.http.get(url, params={"limit": 33})).status_code == 422


async def test_late_or_repeated_events_are_acknowledged_without_effect(api) -> None:
    session = await api.session()
    api.worker.script = [[CALL]]
    await api.turn(session)
    url = f"/v1/sessions/{session}/events"
    done = {"type": "tool_call.completed", "call_id": "c1", "result": "rain"}
    first = (await api.http.post(url, json=done)).json()
    assert not first["late"]
    assert (await api.http.post(url, json=done)).json()["status"] == first["status"] == "completed"
    started = await api.http.post(
        url, json={"type": "tool_call.started", "call_id": "c1", "arguments": "{}"}
    )
    assert (started.status_code, started.json()["late"]) == (200, True)
    await api.http.post(f"/v1/sessions/{session}/turns", json={})
    again = await api.http.post(url, json=done)
    assert (again.status_code, again.json()["late"]) == (200, True)
    other = await api.http.post(url, json={**done, "result": "sun"})
    assert (other.status_code, other.json()["code"]) == (409, "result_conflict")


async def test_a_failed_call_is_appended_for_the_model(api) -> None:
    session = await api.session()
    api.worker.script = [[CALL]]
    await api.turn(session)
    event = {"type": "tool_call.failed", "call_id": "c1", "result": "timed out"}
    receipt = (await api.http.post(f"/v1/sessions/{session}/events", json=event)).json()
    assert receipt["status"] == "failed"
    await api.http.post(f"/v1/sessions/{session}/turns", json={})
    (_, turn) = await api.catalog.turns(session, 0, 5)
    assert turn.messages[0].content == "timed out"


async def test_memory_reports_every_layer(api) -> None:
    session = await api.session()
    await api.turn(session)
    memory = (await api.http.get(f"/v1/sessions/{session}/memory")).json()
    assert memory["session"] == session
    assert (memory["layer_active_rows"], memory["layer_bound_rows"]) == ([3, 2], [96, 96])
    assert (memory["active_rows"], memory["in_slot"]) == (3, True)


async def test_the_worker_and_its_methods_are_described(api) -> None:
    found = (await api.http.get("/v1/methods")).json()
    assert [method["name"] for method in found["methods"]] == ["snapkv", "full", "epicache"]
    assert found["repair"] == {
        "name": "repairkv",
        "summary": "bursts around anchors",
        "settings_schema": {},
    }
    worker = (await api.http.get("/v1/worker")).json()
    assert (worker["model"], worker["min_budget"], worker["max_budget"]) == ("scripted", 16, 1024)


async def test_writes_with_a_key_happen_once(api) -> None:
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
    assert (await api.catalog.session(session)).turns == 1
    deleted = [await api.http.delete(f"/v1/sessions/{session}", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in deleted] == [204, 204]


async def test_two_creations_at_once_with_one_key_make_one_session(api) -> None:
    headers = {"Idempotency-Key": "k1"}
    answers = await asyncio.gather(
        *[api.http.post("/v1/sessions", json={}, headers=headers) for _ in range(4)]
    )
    assert len({answer.json()["id"] for answer in answers}) == 1


async def test_health_and_readiness(api) -> None:
    assert (await api.http.get("/healthz")).json() == {"status": "alive"}
    assert (await api.http.get("/readyz")).json() == {"status": "ready"}
    await api.service.stop()
    unready = await api.http.get("/readyz")
    assert (unready.status_code, unready.json()["code"]) == (503, "shutting_down")
    assert (await api.http.get("/healthz")).status_code == 200
    assert (await api.http.post("/v1/sessions", json={})).status_code == 503


@pytest.mark.parametrize("given", ["request-1", None, "no good\x7f"])
async def test_every_answer_has_a_request_id(api, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given}
    for path in ("/healthz", "/v1/sessions/nobody", "/nowhere"):
        id = (await api.http.get(path, headers=headers)).headers["x-request-id"]
        assert id == given if given == "request-1" else len(id) == 16


async def test_a_stream_sends_tokens_then_done(api, parse_events: Callable) -> None:
    session = await api.session()
    api.worker.script = ["it rains é"]
    answer = await api.turn(session, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parse_events(answer.text)
    assert [name for name, _ in events] == ["token", "token", "token", "done"]
    assert "".join(data["text"] for name, data in events[:3]) == "it rains é "
    plain = (await api.turn(await api.session())).json()
    assert events[-1][1].keys() == plain.keys()


async def test_a_stream_sends_tool_calls(api, parse_events: Callable) -> None:
    session = await api.session()
    api.worker.script = [[CALL]]
    events = parse_events((await api.turn(session, stream=True)).text)
    assert events[0] == ("tool_call", OPENAI_CALL)
    assert events[1][1]["finish_reason"] == "tool_calls"
