"""REST API of episodes."""

import asyncio
from typing import Any


async def test_episodes_are_listed_with_size_medoid_and_matched_turns(
    api: Any,
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
    assert (await api.http.get("/v1/sessions/unknown/episodes")).status_code == 404


async def wait_until_idle(session: str) -> None:
    """Wait for the background tasks of a session."""
    for task in asyncio.all_tasks():
        if task.get_name() == f"background {session}":
            await task
