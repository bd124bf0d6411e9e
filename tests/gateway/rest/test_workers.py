"""Workers over HTTP: which there are, which one has a session, and how it is sent to another."""

import pytest

from kvrecall.domain.errors import WorkerLost


async def test_workers_and_what_they_have_to_do(front) -> None:
    front.worker.names = ["two", "one"]
    front.worker.draining = {"two"}
    shown = (await front.http.get("/v1/workers")).json()["workers"]
    load = {"slots": 4, "free_slots": 3, "queued": 0, "sessions": 1}
    assert shown == [
        {"name": "one", "address": "one:1", "draining": False, **load},
        {"name": "two", "address": "two:1", "draining": True, **load},
    ]


async def test_a_session_says_where_it_is_and_moves(front) -> None:
    front.worker.names = ["one", "two"]
    session = await front.session()
    await front.say(session)
    assert (await front.http.get(f"/v1/sessions/{session}")).json()["worker"] == "one"
    for body, worker in (({}, "two"), ({"worker": "one"}, "one"), ({"worker": None}, "two")):
        moved = await front.http.post(f"/v1/sessions/{session}/move", json=body)
        assert (moved.status_code, moved.json()["worker"]) == (200, worker)
        assert (await front.http.get(f"/v1/sessions/{session}")).json() == moved.json()
    assert (await front.say(session)).json()["turn"] == 2


@pytest.mark.parametrize(
    ("names", "worker", "status", "code"),
    [
        (["one"], None, 422, "invalid_request"),
        (["one", "two"], "three", 422, "invalid_request"),
        (["one", "two"], "two", 409, "worker_unavailable"),
        (["one", "two"], 7, 422, "invalid_request"),
    ],
)
async def test_a_move_that_cannot_be_is_a_problem(
    front, names: list[str], worker: object, status: int, code: str
) -> None:
    front.worker.names = names
    session = await front.session()
    front.worker.draining = {"two"}
    answer = await front.http.post(f"/v1/sessions/{session}/move", json={"worker": worker})
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    if status == 422:
        assert answer.json()["field"] == "worker"


async def test_a_session_that_is_not_there_does_not_move(front) -> None:
    assert (await front.http.post("/v1/sessions/s_none/move", json={})).status_code == 404


async def test_without_a_worker_the_service_is_not_ready(front) -> None:
    front.worker.faults["stats"] = WorkerLost("no worker answers now")
    assert (await front.http.get("/readyz")).status_code == 503
    assert (await front.http.get("/readyz")).status_code == 200


async def test_a_turn_says_whether_it_is_durable(front) -> None:
    session = await front.session()
    assert (await front.say(session)).json()["durable"] is True
    front.worker.durable = False
    assert (await front.say(session)).json()["durable"] is False
