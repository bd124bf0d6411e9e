"""REST API of episodes."""

import asyncio
from typing import Any


async def test_episodes_are_listed_with_size_medoid_and_matched_turns(
    api: Any,
) -> None:
    settings = {"count": 2}
    session = await api.session(method="epicache", budget=80, repair_rows=0, episodes=settings)
    url = f"/v1/sessions/{session}/episodes"
    empty = (await api.http.get(url)).json()
    assert (empty["session"], empty["segments"], empty["builds"], empty["episodes"]) == (
        session,
        0,
        0,
        [],
    )
    assert empty["settings"] == settings | {"build": "one_pass"}
    tea_says, trains_say = "kettle leaves cup", "station rails ticket"
    for text in [tea_says, tea_says, trains_say, trains_say] * 3:
        api.worker.script = [text]
        assert (await api.turn(session, text)).json()["episode"] is None
        await wait_until_idle(session)
    turn = (await api.turn(session, "a ticket for the station")).json()
    assert turn["seconds"]["match"] >= 0
    similarity = turn["episode"].pop("similarity")
    assert 0 < similarity < 1
    moved = {"rows_moved": 20, "rows_kept": 80, "bytes_moved": 1280, "seconds": 0.01}
    assert turn["episode"] == {"episode": "1-2", "switched": True, **moved}
    await api.turn(session, trains_say)
    await wait_until_idle(session)
    found = (await api.http.get(url)).json()
    assert (found["segments"], found["built_segments"], found["builds"]) == (7, 6, 1)
    tea = {"id": "1-1", "active": False, "segments": 3, "tokens": 42, "matched": 0}
    trains = {"id": "1-2", "active": True, "segments": 4, "tokens": 54, "matched": 2}
    tea["medoid"], trains["medoid"] = (
        "\n".join([f"user: {text}\nassistant: {text}"] * 2) for text in (tea_says, trains_say)
    )
    assert found["episodes"] == [tea, trains]
    assert (await api.http.get("/v1/sessions/unknown/episodes")).status_code == 404


async def wait_until_idle(session: str) -> None:
    """Wait for the background tasks of a session."""
    for task in asyncio.all_tasks():
        if task.get_name() == f"background {session}":
            await task
