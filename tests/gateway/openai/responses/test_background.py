"""Responses in the background: read, streamed again, cancelled, deleted, and found after a loss."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError, WorkerLost

Json = dict[str, Any]
HELLO: list[Json] = [{"role": "user", "content": "hello"}]


async def get(api: Any, id: str) -> Json:
    found: Json = (await api.http.get(f"/v1/responses/{id}")).json()
    return found


async def get_ended(api: Any, id: str) -> Json:
    """Poll a response as clients do, to its end."""
    for _ in range(1000):
        if (found := await get(api, id))["status"] not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{id} does not end")


async def end_runs() -> None:
    """Wait until nothing is computed in the background."""
    names = ("background response", "background response watch")
    running = [task for task in asyncio.all_tasks() if task.get_name() in names]
    if running:
        await asyncio.wait(running)


@pytest.fixture
def held(api: Any) -> asyncio.Event:
    """Each word of an answer waits for this."""
    api.worker.gates["token"] = gate = asyncio.Event()
    return gate


@pytest.fixture
def read_again(api: Any, parse_events: Callable[[str], Any]) -> Any:
    """read_again(id, after=None): the events of a response from there to its end."""

    async def read(id: str, after: int | None = None) -> list[tuple[str, Json]]:
        params = {"stream": True} | ({} if after is None else {"starting_after": after})
        response = await api.http.get(f"/v1/responses/{id}", params=params)
        assert response.headers["content-type"].startswith("text/event-stream")
        events: list[tuple[str, Json]] = parse_events(response.text)
        return events

    return read


@pytest.fixture
def lose_ends(api: Any) -> Callable[[], None]:
    """lose_ends(): from the next one that was stored in progress, no end is stored until undone."""
    store = api.catalog.responses.store
    lost = False

    async def store_beginnings(response: Any, *limits: Any) -> None:
        if lost and '"in_progress"' not in response.body:
            raise CatalogError("lost")
        await store(response, *limits)

    def toggle() -> None:
        nonlocal lost
        lost = not lost

    api.catalog.responses.store = store_beginnings
    return toggle


async def test_a_response_is_in_progress_until_it_is_complete(api, answer, held, get_text) -> None:
    api.worker.script = ["one two"]
    begun = await answer("hello", background=True)
    assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
    assert (await get(api, begun["id"])) == begun | {"status": "in_progress"}
    held.set()
    ended = await get_ended(api, begun["id"])
    assert (ended["status"], get_text(ended)) == ("completed", "one two")
    assert ended["usage"]["output_tokens"] == 2
    plain = await answer("more", previous_response_id=begun["id"])
    assert plain["status"] == "completed"


async def test_its_events_can_be_read_from_anywhere_again(
    api, ask, answer, held, read_again, parse_events
) -> None:
    api.worker.script = ["one two three"]
    begun = await answer("hello", background=True)
    reading = asyncio.create_task(read_again(begun["id"], 1))
    await asyncio.sleep(0)
    held.set()
    later = await reading
    events = await read_again(begun["id"])
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert later == events[2:]
    assert events[-1][1]["response"] == await get(api, begun["id"])
    streamed = parse_events((await ask("other", background=True, stream=True)).text)
    assert [kind for kind, _ in streamed[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert streamed[-1][0] == "response.completed"


async def test_one_in_progress_is_cancelled_and_changes_nothing_else(api, answer, held) -> None:
    begun = await answer("hello", background=True)
    url = f"/v1/responses/{begun['id']}/cancel"
    cancelled = (await api.http.post(url)).json()
    assert (cancelled["status"], cancelled["id"]) == ("cancelled", begun["id"])
    held.set()
    assert await get(api, begun["id"]) == cancelled
    assert (await api.http.post(url)).json() == cancelled
    (session,) = await api.catalog.sessions.get_ids()
    assert (await api.service.get(session))[0].turns == 0
    done = await answer("hello", background=True)
    ended = await get_ended(api, done["id"])
    again = await api.http.post(f"/v1/responses/{done['id']}/cancel")
    assert again.json() == ended, "one that has ended stays as it is"


async def test_one_that_is_deleted_ends(api, answer, held) -> None:
    begun = await answer("hello", background=True)
    assert (await api.http.delete(f"/v1/responses/{begun['id']}")).status_code == 200
    held.set()
    assert (await api.http.get(f"/v1/responses/{begun['id']}")).status_code == 404
    (session,) = await api.catalog.sessions.get_ids()
    assert (await api.service.get(session))[0].turns == 0


async def test_one_that_another_process_cancels_ends_here(api, answer, held) -> None:
    begun = await answer("hello", background=True)
    stored = await api.service.responses.get(begun["id"], "")
    body = stored.body.replace('"in_progress"', '"cancelled"')
    await api.service.responses.store(replace(stored, body=body))
    await end_runs()
    assert not api.worker.open_turns
    assert (await get(api, begun["id"]))["status"] == "cancelled"


async def test_a_failure_is_the_end_of_the_response(api, answer, read_again) -> None:
    api.worker.faults["turn"] = WorkerLost("gone")
    begun = await answer("hello", background=True)
    ended = await get_ended(api, begun["id"])
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")
    assert (await read_again(begun["id"]))[-1][0] == "response.failed"


async def test_what_was_committed_is_found_when_its_end_was_not_stored(
    api, answer, lose_ends, get_text
) -> None:
    api.worker.script = ["one two", "three"]
    lose_ends()
    begun = await answer("hello", background=True)
    (session,) = await api.catalog.sessions.get_ids()
    await end_runs()
    assert (await api.service.get(session))[0].turns == 1
    lose_ends()
    ended = await get(api, begun["id"])
    assert (ended["status"], get_text(ended)) == ("completed", "one two")
    assert ended["usage"]["output_tokens"] == 2
    assert await get(api, begun["id"]) == ended
    second = await answer("more", previous_response_id=begun["id"])
    assert get_text(second) == "three"
    (session,) = await api.catalog.sessions.get_ids()


async def test_what_nobody_computes_any_more_has_failed(api, answer, lose_ends) -> None:
    api.worker.faults["turn"] = WorkerLost("gone")
    lose_ends()
    begun = await answer("hello", background=True)
    await end_runs()
    claim = api.service.responses.claim(begun["id"])
    await claim.acquire(0)
    assert (await get(api, begun["id"]))["status"] == "in_progress", "another process has it"
    await claim.release()
    lose_ends()
    ended = await get(api, begun["id"])
    assert (ended["status"], ended["error"]["code"]) == ("failed", "server_error")


async def test_what_is_not_to_be_stored_is_not_in_the_background(api, ask) -> None:
    refused = await ask("hello", background=True, store=False)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")
    assert await api.catalog.sessions.get_ids() == []


async def test_a_conversation_gets_the_answer_at_its_end(api, answer, held) -> None:
    conversation = (await api.http.post("/v1/conversations", json={})).json()["id"]
    begun = await answer("hello", background=True, conversation=conversation)
    held.set()
    await get_ended(api, begun["id"])
    items = (await api.http.get(f"/v1/conversations/{conversation}/items")).json()["data"]
    assert [item["role"] for item in items] == ["assistant", "user"]


async def test_what_follows_one_that_ended_badly_is_another_response(api, answer, ask) -> None:
    first = await answer("hello")
    follow = {"previous_response_id": first["id"], "background": True}
    api.worker.faults["turn"] = WorkerLost("gone")
    failed = await get_ended(api, (await answer("more", **follow))["id"])
    assert failed["status"] == "failed"
    done = await get_ended(api, (await answer("other", **follow))["id"])
    assert done["id"] != failed["id"]
    assert await get(api, failed["id"]) == failed
    refused = await ask("on", previous_response_id=failed["id"])
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    for response, said in ((failed, ["ok", "hello"]), (done, ["other", "ok", "hello"])):
        items = (await get(api, f"{response['id']}/input_items"))["data"]
        assert [item["content"][0]["text"] for item in items] == said
    again = await answer([{"type": "item_reference", "id": done["output"][0]["id"]}, *HELLO])
    assert again["status"] == "completed"


async def test_a_request_repeated_under_its_key_is_the_same_response(api, ask) -> None:
    key = {"Idempotency-Key": "one"}
    first = (await ask("hello", background=True, headers=key)).json()
    ended = await get_ended(api, first["id"])
    again = await ask("hello", background=True, headers=key)
    assert again.json()["id"] == first["id"]
    repeated = await get_ended(api, first["id"])
    assert repeated["output"] == ended["output"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_waits_until_the_first_has_stored_its_end(
    api, ask, stream
) -> None:
    store, stored, reached, gate = api.catalog.responses.store, [], asyncio.Event(), asyncio.Event()

    async def store_late(response: Any, *limits: Any) -> None:
        if '"in_progress"' not in response.body:
            reached.set()
            await gate.wait()
        stored.append(json.loads(response.body)["status"])
        await store(response, *limits)

    api.catalog.responses.store = store_late
    key = {"Idempotency-Key": "one"}
    first = asyncio.create_task(ask("hello", background=True, headers=key, stream=stream))
    await reached.wait()
    repeats = [
        asyncio.create_task(ask("hello", background=True, headers=key, stream=stream))
        for _ in range(2)
    ]
    await asyncio.wait(repeats, timeout=1.5)
    gate.set()
    (repeated, other), begun = await asyncio.gather(asyncio.gather(*repeats), first)
    assert (repeated.status_code, other.status_code) == (200, 200)
    assert repeated.text == other.text
    assert stored == ["in_progress", "completed"], "nothing is computed or stored again"
    if stream:
        assert "response.completed" in repeated.text
        assert begun.headers["kvrecall-session"] == repeated.headers["kvrecall-session"]
    else:
        assert repeated.json() == await get(api, begun.json()["id"])
        assert repeated.json()["status"] == "completed"
