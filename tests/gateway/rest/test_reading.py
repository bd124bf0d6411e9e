"""REST API of what sessions hold: log, memory map, tokens, family, pauses, filters."""

import asyncio
import base64
from datetime import datetime
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from services.reading.search import SCANNED

WEATHER = pb.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')


async def get(api: Any, path: str, **params: Any) -> Any:
    answer = await api.http.get(path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def pause(api: Any, session: str) -> None:
    api.worker.script = [[WEATHER]]
    assert (await api.turn(session, "how is it in Bern")).json()["finish_reason"] == "tool_calls"


async def report(api: Any, session: str, kind: str, **fields: Any) -> None:
    body = {"type": kind, "call_id": "c1", **fields}
    answer = await api.http.post(f"/v1/sessions/{session}/events", json=body)
    assert answer.status_code == 200, answer.text


class TestTurns:
    async def test_the_log_has_messages_answers_positions_and_times(self, api: Any) -> None:
        session = await api.session()
        api.worker.script = ["hello yourself", "two words"]
        first = (await api.turn(session, "hello")).json()
        await api.turn(session, "and now")
        log = await get(api, f"/v1/sessions/{session}/turns")
        assert (log["turns_total"], log["next_after"], len(log["turns"])) == (2, None, 2)
        one, two = log["turns"]
        assert one["messages"] == [
            {
                "role": "user",
                "content": "hello",
                "tool_calls": None,
                "tool_call_id": None,
                "name": None,
                "reasoning": None,
            }
        ]
        assert one["answer"]["content"] == "hello yourself"
        # The stub's tokens are words: those of the role, of the text, of the answer.
        assert (one["start"], one["stop"]) == (0, 4)
        assert (two["start"], two["stop"]) == (4, 9)
        assert log["length"] == two["stop"]
        assert [(span["side"], span["start"], span["stop"]) for span in two["spans"]] == [
            ("user", 4, 7),
            ("assistant", 7, 9),
        ]
        assert one["memory"] == first["memory"]
        assert (one["worker"], one["retries"], one["durable"]) == ("one", 0, True)
        started, committed = map(datetime.fromisoformat, (one["started_at"], one["committed_at"]))
        assert started <= committed <= datetime.fromisoformat(two["started_at"])
        assert one["phase_starts"].keys() == one["seconds"].keys()
        assert one["phase_starts"]["waiting"] == 0.0

    async def test_the_log_is_read_in_pages(self, api: Any) -> None:
        session = await api.session()
        for _ in range(3):
            await api.turn(session)
        path = f"/v1/sessions/{session}/turns"
        page = await get(api, path, limit=2)
        assert ([turn["turn"] for turn in page["turns"]], page["next_after"]) == ([1, 2], 2)
        page = await get(api, path, limit=2, after=2)
        assert ([turn["turn"] for turn in page["turns"]], page["next_after"]) == ([3], None)
        assert (await get(api, path, after=7))["turns"] == []


class TestMemoryMap:
    async def test_the_map_has_cells_for_each_layer_of_the_tokens_asked_for(self, api: Any) -> None:
        session = await api.session()
        api.worker.script = ["one two three four"]
        await api.turn(session, "hello there")
        found = await get(api, f"/v1/sessions/{session}/memory/map", columns=3)
        assert (found["length"], found["start"], found["stop"], found["columns"]) == (7, 0, 7, 3)
        assert [base64.b64decode(layer["active"]) for layer in found["layers"]] == [b"\xff" * 3] * 2
        assert [base64.b64decode(layer["promoted"]) for layer in found["layers"]] == [bytes(3)] * 2
        assert (found["sinks"], found["recent_start"], found["turn_start"]) == (2, 4, 0)
        assert (found["turns"], found["repairs"], found["episode"]) == (1, 0, "")
        part = await get(
            api, f"/v1/sessions/{session}/memory/map", start=2, stop=5, columns=9, head=0
        )
        assert (part["start"], part["stop"], part["columns"], part["head"]) == (2, 5, 3, 0)

    async def test_a_session_without_a_turn_has_an_empty_map(self, api: Any) -> None:
        session = await api.session()
        found = await get(api, f"/v1/sessions/{session}/memory/map")
        assert (found["length"], found["columns"], found["layers"]) == (0, 0, [])
        assert found["turn_start"] is None
        assert (await get(api, f"/v1/sessions/{session}/memory/tokens"))["tokens"] == []

    @pytest.mark.parametrize(
        ("route", "params", "field"),
        [
            ("map", {"head": 1}, "head"),
            ("map", {"start": 8}, "start"),
            ("map", {"start": 3, "stop": 2}, "start"),
            ("map", {"columns": 2001}, "columns"),
            ("tokens", {"start": 9, "stop": 10}, "start"),
            ("tokens", {"stop": 513}, "stop"),
            ("tokens", {"start": -1}, "start"),
        ],
    )
    async def test_what_is_not_there_is_refused(
        self, api: Any, route: str, params: Any, field: str
    ) -> None:
        session = await api.session()
        api.worker.script = ["one two three four"]
        await api.turn(session, "hello there")
        answer = await api.http.get(f"/v1/sessions/{session}/memory/{route}", params=params)
        assert answer.status_code == 422
        assert field in answer.text

    async def test_the_map_is_of_what_is_committed_while_a_turn_runs(self, api: Any) -> None:
        session = await api.session()
        await api.turn(session, "hello")
        before = await get(api, f"/v1/sessions/{session}/memory/map")
        api.worker.gates["token"] = asyncio.Event()
        api.worker.reached["token"].clear()
        running = asyncio.create_task(api.turn(session, "and more"))
        await api.worker.reached["token"].wait()
        assert (await get(api, f"/v1/sessions/{session}"))["state"] == "prefilling"
        assert await get(api, f"/v1/sessions/{session}/memory/map") == before
        api.worker.gates.pop("token").set()
        await running
        after = await get(api, f"/v1/sessions/{session}/memory/map")
        assert after["length"] > before["length"]


class TestTokens:
    async def test_tokens_have_their_text_turn_rows_and_reason(self, api: Any) -> None:
        session = await api.session()
        for text in ("alpha beta", "gamma delta epsilon zeta"):
            api.worker.script = ["ok"]
            await api.turn(session, text)
        found = await get(api, f"/v1/sessions/{session}/memory/tokens", start=1)
        words = ["alpha", "beta", "ok", "user", "gamma", "delta", "epsilon", "zeta", "ok"]
        assert [token["text"] for token in found["tokens"]] == words
        assert [token["position"] for token in found["tokens"]] == list(range(1, 10))
        assert [token["turn"] for token in found["tokens"]] == [1] * 3 + [2] * 6
        assert [token["side"] for token in found["tokens"]] == (
            ["user", "user", "assistant"] + ["user"] * 5 + ["assistant"]
        )
        assert [token["reason"] for token in found["tokens"]] == (
            ["sink", "fits", "fits"] + ["turn"] * 3 + ["recent"] * 3
        )
        for token in found["tokens"]:
            assert (token["held"], token["promoted"]) == (["1", "1"], ["0", "0"])
            assert (token["rows"], token["rows_total"], token["score"]) == (2, 2, None)
            assert token["detail"]
        some = await get(api, f"/v1/sessions/{session}/memory/tokens", start=4, stop=6)
        assert some["tokens"] == found["tokens"][3:5]
        assert (some["start"], some["stop"], some["layers"], some["kv_heads"]) == (4, 6, 2, 1)

    async def test_tokens_name_the_repairs_that_promoted_them(self, api: Any) -> None:
        session = await api.session(repair_on=["turn"], repair_rows=8)
        for _ in range(2):
            answer = await api.turn(session, "hello there you", repair=True)
            assert answer.status_code == 200, answer.text
        tokens = (await get(api, f"/v1/sessions/{session}/memory/tokens"))["tokens"]
        # The stub's repair promotes the tokens 0, 1 and 3.
        assert [token["repairs"] for token in tokens[:4]] == [[1, 2], [1, 2], [], [1, 2]]
        assert [token["repair"] for token in tokens[:4]] == [2, 2, None, 2]


class TestPauses:
    async def test_a_pause_has_its_calls_with_times_and_its_repairs(self, api: Any) -> None:
        session = await api.session()
        await pause(api, session)
        (found,) = (await get(api, f"/v1/sessions/{session}/pauses"))["pauses"]
        (call,) = found["calls"]
        assert (found["turn"], found["open"], found["ended_at"]) == (1, True, None)
        assert (call["id"], call["status"], call["started"]) == ("c1", "pending", False)
        assert (call["started_at"], call["ended_at"], call["result_bytes"]) == (None, None, None)
        await report(api, session, "tool_call.started")
        await report(api, session, "tool_call.delta", delta="ra")
        await report(api, session, "tool_call.completed", result="rain")
        await api.turn(session, "and?", wait_for_repairs=True)
        (found,) = (await get(api, f"/v1/sessions/{session}/pauses"))["pauses"]
        (call,) = found["calls"]
        assert (call["status"], call["output_pieces"], call["output_bytes"]) == ("completed", 1, 2)
        assert call["result_bytes"] == 4
        times = [found["began_at"], call["started_at"], call["ended_at"], found["ended_at"]]
        assert times == sorted(times)
        assert call["called_at"] == found["began_at"]
        assert found["open"] is False
        assert [repair["trigger"] for repair in found["repairs"]] == ["tool_call", "tool_result"]
        for repair in found["repairs"]:
            assert repair["call_id"] == "c1"
            assert found["began_at"] <= repair["started_at"] <= repair["at"]
        listed = (await get(api, f"/v1/sessions/{session}/repairs"))["repairs"]
        assert [(each["number"], each["call_id"]) for each in listed] == [(2, "c1"), (1, "c1")]

    async def test_pauses_are_listed_newest_first(self, api: Any) -> None:
        session = await api.session()
        for turn in range(2):
            api.worker.script = [[pb.ToolCall(id=f"c{turn}", name="f", arguments="{}")]]
            await api.turn(session, "go on")
            body = {"type": "tool_call.failed", "call_id": f"c{turn}", "result": "no"}
            await api.http.post(f"/v1/sessions/{session}/events", json=body)
            await api.turn(session, "so?")
        path = f"/v1/sessions/{session}/pauses"
        assert [each["turn"] for each in (await get(api, path))["pauses"]] == [3, 1]
        (newest,) = (await get(api, path, limit=1))["pauses"]
        assert (newest["turn"], newest["calls"][0]["status"]) == (3, "failed")


class TestFamily:
    async def test_a_family_is_the_tree_of_all_forks(self, api: Any) -> None:
        root, stranger = await api.session(), await api.session()
        await api.turn(root, "one two three four five six seven")
        children = []
        for parent in (root, root):
            child = await api.http.post(f"/v1/sessions/{parent}/fork", json={})
            children.append(child.json()["id"])
        await api.turn(children[0], "more")
        grand = (await api.http.post(f"/v1/sessions/{children[0]}/fork", json={})).json()["id"]
        found = await get(api, f"/v1/sessions/{grand}/family")
        assert (found["root"], found["complete"], found["scanned"]) == (root, True, 5)
        members = {member["id"]: member for member in found["members"]}
        assert list(members) == [root, *children, grand]
        assert stranger not in members
        assert [(each["parent"], each["turn"]) for each in found["members"]] == [
            (None, None),
            (root, 1),
            (root, 1),
            (children[0], 2),
        ]
        # Nine words are two whole pages of four.
        assert members[children[1]]["shared_tokens"] == 8
        for session in (root, children[0]):
            other = await get(api, f"/v1/sessions/{session}/family")
            assert other["members"] == found["members"]

    async def test_a_deleted_parent_is_named_and_does_not_exist(self, api: Any) -> None:
        root = await api.session()
        await api.turn(root)
        child = (await api.http.post(f"/v1/sessions/{root}/fork", json={})).json()["id"]
        assert (await api.http.delete(f"/v1/sessions/{root}")).status_code == 204
        gone, left = (await get(api, f"/v1/sessions/{child}/family"))["members"]
        assert (gone["id"], gone["exists"], gone["state"]) == (root, False, None)
        assert (left["id"], left["parent"], left["exists"]) == (child, root, True)


class TestSearch:
    async def list_ids(self, api: Any, **params: Any) -> list[str]:
        return [each["id"] for each in (await get(api, "/v1/sessions", **params))["sessions"]]

    async def test_sessions_are_found_by_state_method_worker_and_text(self, api: Any) -> None:
        plain = await api.session(metadata={"user": "Ann Lee"})
        full = await api.session(method="full", repair_rows=0)
        await pause(api, full)
        assert await self.list_ids(api, state="paused") == [full]
        assert await self.list_ids(api, state="idle") == [plain]
        assert await self.list_ids(api, method="full") == [full]
        assert await self.list_ids(api, worker="one") == [full, plain]
        assert await self.list_ids(api, worker="two") == []
        assert await self.list_ids(api, q="ann lee") == [plain]
        assert await self.list_ids(api, q=full[2:12].upper()) == [full]
        assert await self.list_ids(api, q="ann", method="full") == []

    async def test_a_filter_goes_on_where_the_page_before_it_ended(self, api: Any) -> None:
        wanted = [
            await api.session(method=method)
            for method in ("full", "snapkv", "full", "snapkv", "full")
        ]
        found, cursor, pages = [], None, 0
        while True:
            params: dict[str, Any] = {"cursor": cursor} if cursor else {}
            page = await get(api, "/v1/sessions", method="full", limit=1, **params)
            found += [each["id"] for each in page["sessions"]]
            pages += 1
            if (cursor := page["next_cursor"]) is None:
                break
        assert found == wanted[::-2]
        assert pages == 3

    async def test_sessions_are_ordered_by_their_last_turn_and_by_length(self, api: Any) -> None:
        first, second, third = [await api.session() for _ in range(3)]
        await api.turn(third, "short")
        await api.turn(first, "a much longer message than the others")
        await api.turn(second, "of some length")
        assert await self.list_ids(api, order="updated") == [second, first, third]
        assert await self.list_ids(api, order="length") == [first, second, third]
        page = await get(api, "/v1/sessions", order="length", limit=2)
        rest = await get(api, "/v1/sessions", order="length", limit=2, cursor=page["next_cursor"])
        assert [each["id"] for each in page["sessions"] + rest["sessions"]] == [
            first,
            second,
            third,
        ]
        assert (rest["next_cursor"], rest["truncated"], rest["scanned"]) == (None, False, 3)

    async def test_an_order_says_what_it_left_out(
        self, api: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert SCANNED == 2000
        monkeypatch.setattr("services.reading.search.SCANNED", 2)
        oldest, middle, newest = [await api.session() for _ in range(3)]
        await api.turn(oldest)
        page = await get(api, "/v1/sessions", order="updated")
        assert {each["id"] for each in page["sessions"]} == {middle, newest}
        assert (page["scanned"], page["truncated"]) == (2, True)
        page = await get(api, "/v1/sessions", q=oldest)
        assert (page["sessions"], page["scanned"]) == ([], 2)
        page = await get(api, "/v1/sessions", q=oldest, cursor=page["next_cursor"])
        assert [each["id"] for each in page["sessions"]] == [oldest]

    async def test_a_session_shows_its_memory_and_whether_it_is_durable(self, api: Any) -> None:
        session = await api.session()
        assert (await get(api, f"/v1/sessions/{session}"))["durable"] is None
        api.worker.durable = False
        turn = (await api.turn(session)).json()
        shown = await get(api, f"/v1/sessions/{session}")
        assert shown["durable"] is False
        assert shown["memory"] == {name: turn["memory"][name] for name in shown["memory"]}
        api.worker.durable = True
        await pause(api, session)
        await report(api, session, "tool_call.completed", result="rain")
        await api.turn(session, wait_for_repairs=True)
        assert (await get(api, f"/v1/sessions/{session}"))["durable"] is True

    async def test_a_repair_leaves_durability_as_the_turn_reported_it(self, api: Any) -> None:
        session = await api.session(repair_rows=8)
        api.worker.durable = False
        await pause(api, session)
        background = f"background {session}"
        for task in [task for task in asyncio.all_tasks() if task.get_name() == background]:
            await task
        assert (await get(api, f"/v1/sessions/{session}/repairs"))["repairs"]
        assert (await get(api, f"/v1/sessions/{session}"))["durable"] is False


async def test_the_version_names_release_revision_and_model(api: Any) -> None:
    found = await get(api, "/version")
    assert found["model"] == "scripted"
    assert (found["fingerprint"], found["revision"]) == ("f00d", "")
    assert found["version"][0].isdigit()
