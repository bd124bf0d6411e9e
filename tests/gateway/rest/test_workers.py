"""REST API of workers: their load, the worker of a session, moves between workers."""

from typing import Any

import pytest

from kvrecall.domain.errors import WorkerLost


async def test_workers_are_listed_with_their_load(api: Any) -> None:
    api.worker.names = ["two", "one"]
    api.worker.draining = {"two"}
    shown = (await api.http.get("/v1/workers")).json()["workers"]
    counted = [each.pop("stats") for each in shown]
    load = {"slots": 4, "free_slots": 3, "queued": 0, "sessions": 1}
    assert shown == [
        {"name": "one", "address": "one:1", "draining": False, **load},
        {"name": "two", "address": "two:1", "draining": True, **load},
    ]
    for stats in counted:
        assert (stats["lost_pages"], stats["rebuilt_pages"], stats["sessions"]) == (3, 2, 0)
        assert [(tier["name"], tier["bytes"]) for tier in stats["tiers"]] == [
            ("nvme", 1280),
            ("ram", 640),
        ]


async def test_a_worker_that_does_not_answer_has_no_counters(api: Any) -> None:
    api.worker.faults["stats"] = WorkerLost("it is gone")
    (shown,) = (await api.http.get("/v1/workers")).json()["workers"]
    assert (shown["name"], shown["stats"]) == ("one", None)


async def test_a_session_reports_its_worker_and_moves(api: Any) -> None:
    api.worker.names = ["one", "two"]
    session = await api.session()
    await api.turn(session)
    assert (await api.http.get(f"/v1/sessions/{session}")).json()["worker"] == "one"
    for body, worker in (({}, "two"), ({"worker": "one"}, "one"), ({"worker": None}, "two")):
        moved = await api.http.post(f"/v1/sessions/{session}/move", json=body)
        assert (moved.status_code, moved.json()["worker"]) == (200, worker)
        assert (await api.http.get(f"/v1/sessions/{session}")).json() == moved.json()
    assert (await api.turn(session)).json()["turn"] == 2


@pytest.mark.parametrize(
    ("names", "worker", "status", "code"),
    [
        (["one"], None, 422, "invalid_request"),
        (["one", "two"], "three", 422, "invalid_request"),
        (["one", "two"], "two", 409, "worker_unavailable"),
        (["one", "two"], 7, 422, "invalid_request"),
    ],
)
async def test_an_impossible_move_is_a_problem(
    api: Any, names: list[str], worker: object, status: int, code: str
) -> None:
    api.worker.names = names
    session = await api.session()
    api.worker.draining = {"two"}
    answer = await api.http.post(f"/v1/sessions/{session}/move", json={"worker": worker})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    if status == 422:
        assert answer.json()["field"] == "worker"


async def test_an_unknown_session_cannot_be_moved(api: Any) -> None:
    assert (await api.http.post("/v1/sessions/s_none/move", json={})).status_code == 404


async def test_a_gateway_without_workers_is_ready_but_not_for_turns(api: Any) -> None:
    api.worker.faults["stats"] = WorkerLost("no worker answers now")
    assert (await api.http.get("/readyz")).status_code == 200
    assert (await api.http.get("/readyz", params={"workers": True})).status_code == 503
    assert (await api.http.get("/readyz", params={"workers": True})).status_code == 200


async def test_a_turn_reports_its_durability(api: Any) -> None:
    session = await api.session()
    assert (await api.turn(session)).json()["durable"] is True
    api.worker.durable = False
    assert (await api.turn(session)).json()["durable"] is False


async def test_the_worker_and_its_methods_are_described(api: Any) -> None:
    found = (await api.http.get("/v1/methods")).json()
    assert [method["name"] for method in found["methods"]] == [
        "icecache",
        "snapkv",
        "full",
        "epicache",
    ]
    assert found["repair"] == {
        "name": "repairkv",
        "summary": "bursts around anchors",
        "settings_schema": {},
    }
    assert found["prefill"] == {
        "name": "prefill",
        "summary": "lines of blocks",
        "settings_schema": {},
    }
    assert found["retrieve"] == {
        "name": "retrieval",
        "summary": "rows of a step",
        "settings_schema": {},
    }
    worker = (await api.http.get("/v1/worker")).json()
    assert (worker["model"], worker["min_budget"], worker["max_budget"]) == ("scripted", 16, 1024)
