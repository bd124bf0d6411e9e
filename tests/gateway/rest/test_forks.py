"""REST API of forks."""

from typing import Any


async def test_a_fork_is_a_session_with_its_fork_point(api: Any) -> None:
    parent = await api.session(metadata={"name": "first"})
    assert (await api.http.get(f"/v1/sessions/{parent}")).json()["forked_from"] is None
    await api.turn(parent)
    await api.turn(parent)
    answer = await api.http.post(
        f"/v1/sessions/{parent}/fork", json={"turn": 1, "metadata": {"name": "second"}}
    )
    assert answer.status_code == 201, answer.text
    view = answer.json()
    assert (view["forked_from"], view["turns"], view["state"]) == (
        {"session": parent, "turn": 1},
        1,
        "idle",
    )
    assert (view["metadata"], view["seed"], view["length"]) == ({"name": "second"}, 1, 3)
    assert (await api.http.get(f"/v1/sessions/{view['id']}")).json() == view
    assert (await api.turn(view["id"])).json()["turn"] == 2


async def test_a_fork_without_a_body_is_at_the_last_turn(api: Any) -> None:
    parent = await api.session(metadata={"name": "first"})
    await api.turn(parent)
    answer = await api.http.post(f"/v1/sessions/{parent}/fork")
    assert (answer.status_code, answer.json()["turns"]) == (201, 1)
    assert answer.json()["metadata"] == {"name": "first"}


async def test_a_repeated_fork_gets_the_same_response(api: Any) -> None:
    parent = await api.session()
    await api.turn(parent)
    url = f"/v1/sessions/{parent}/fork"
    headers = {"Idempotency-Key": "k"}
    first = await api.http.post(url, json={}, headers=headers)
    assert (await api.http.post(url, json={}, headers=headers)).json() == first.json()
    other = await api.http.post(url, json={"turn": 1}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
    assert len((await api.http.get("/v1/sessions")).json()["sessions"]) == 2


async def test_an_unknown_turn_is_not_found(api: Any) -> None:
    parent = await api.session()
    for body in ({}, {"turn": 0}, {"turn": 1}):
        answer = await api.http.post(f"/v1/sessions/{parent}/fork", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "unknown_turn")
    missing = await api.http.post("/v1/sessions/s_none/fork", json={})
    assert (missing.status_code, missing.json()["code"]) == (404, "unknown_session")


async def test_an_invalid_fork_is_rejected(api: Any) -> None:
    parent = await api.session()
    for body, field in (
        ({"turn": -1}, "turn"),
        ({"turn": "1"}, "turn"),
        ({"budget": 64}, "budget"),
    ):
        answer = await api.http.post(f"/v1/sessions/{parent}/fork", json=body)
        assert (answer.status_code, answer.json()["field"]) == (422, field)
