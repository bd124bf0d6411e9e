"""The metrics page says what happened."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as wire


async def scrape(front) -> dict[tuple[str, ...], float]:
    """Every sample of the page by its name and label values."""
    page = await front.http.get("/metrics")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(page.text)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


async def test_turns_phases_and_rows_are_counted(front) -> None:
    one = await front.session()
    other = await front.session(budget=16)
    front.worker.script = ["a b", "c " * 30]
    await front.say(one)
    await front.say(other)
    await front.say(one, generate=False)
    samples = await scrape(front)
    assert samples["kvrecall_turns_total", "stop"] == 2
    assert samples["kvrecall_turns_total", "appended"] == 1
    assert samples["kvrecall_tokens_total", "prompt"] == 6
    assert samples["kvrecall_tokens_total", "output"] == 32
    assert samples["kvrecall_turn_phase_seconds_sum", "decode"] == 2.25
    assert samples["kvrecall_turn_phase_seconds_count", "prefill"] == 3
    assert samples["kvrecall_active_rows",] == 6 + 16
    assert samples["kvrecall_active_bytes",] == 22 * 64
    assert samples["kvrecall_evicted_rows",] == 16
    assert samples["kvrecall_http_requests_total", "POST", "200"] == 3


async def test_repairs_and_promotions_are_counted(front) -> None:
    session = await front.session()
    front.worker.script = [[wire.ToolCall(id="c1", name="f", arguments="{}")]]
    await front.say(session)
    event = {"type": "tool_call.completed", "call_id": "c1", "result": "a"}
    await front.http.post(f"/v1/sessions/{session}/events", json=event)
    await front.http.post(f"/v1/sessions/{session}/turns", json={"wait_for_repairs": True})
    samples = await scrape(front)
    assert samples["kvrecall_repair_seconds_sum", "tool_call"] == 0.5
    assert samples["kvrecall_repair_seconds_count", "tool_result"] == 1
    for name, value in (
        ("repair_candidates", 8),
        ("repair_scored_rows", 8),
        ("promoted_rows", 2),
        ("demoted_rows", 1),
    ):
        assert samples[f"kvrecall_{name}_total", "tool_result"] == value
    assert samples["kvrecall_repair_read_bytes_total", "tool_call"] == 640
    assert samples["kvrecall_repairs_cut_total", "tool_call"] == 0
    assert samples["kvrecall_repair_share_scanned_count",] == 2


async def test_repairs_that_end_in_their_pause_and_those_that_a_turn_ends_are_counted_apart(
    front,
) -> None:
    session = await front.session()
    front.worker.script = [[wire.ToolCall(id="c1", name="f", arguments="{}")]]
    await front.say(session)
    await rested(session)
    front.worker.gates["repair"] = asyncio.Event()
    front.worker.reached["repair"].clear()
    for result in (
        {"type": "tool_call.delta", "delta": "a" * 300},
        {"type": "tool_call.completed", "result": "a"},
    ):
        await front.http.post(f"/v1/sessions/{session}/events", json={"call_id": "c1", **result})
        await front.worker.reached["repair"].wait()
    await front.http.post(f"/v1/sessions/{session}/turns", json={})
    samples = await scrape(front)
    assert samples["kvrecall_repairs_between_turns_total", "end"] == 1
    assert samples["kvrecall_repairs_between_turns_total", "turn"] == 1
    assert samples["kvrecall_repairs_left_out_total",] == 1
    assert samples["kvrecall_repairs_cut_total", "tool_delta"] == 1
    assert samples["kvrecall_repair_share_scanned_sum",] == 1.5


async def test_pauses_that_time_out_are_counted(front) -> None:
    session = await front.session()
    front.worker.script = [[wire.ToolCall(id="c1", name="f", arguments="{}")]]
    await front.say(session)
    front.service._timeouts._seconds = 0.0
    await front.service._timeouts.sweep()
    assert (await scrape(front))["kvrecall_pauses_timed_out_total",] == 1
    shown = (await front.http.get(f"/v1/sessions/{session}")).json()
    assert [call["status"] for call in shown["pending_calls"]] == ["timed_out"]


async def test_switches_and_what_they_move_are_counted(front) -> None:
    settings = {"count": 2, "segment_utterances": 2, "medoid_utterances": 2, "rebuild_growth": 9}
    session = await front.session(method="epicache", budget=16, repair_rows=0, episodes=settings)
    for text in ("kettle leaves cup", "station rails ticket") * 3:
        front.worker.script = [text]
        await front.say(session, text)
        await rested(session)
    await front.say(session, "station rails")
    await rested(session)
    front.worker.faults["embed"] = WorkerLost("gone")
    await front.say(session, "kettle")
    samples = await scrape(front)
    assert samples["kvrecall_episode_matches_total",] == 3
    assert samples["kvrecall_episode_switches_total",] == 2
    assert samples["kvrecall_episode_moved_rows_total",] == 40
    assert samples["kvrecall_episode_moved_bytes_total",] == 2560
    assert samples["kvrecall_episode_build_seconds_sum",] == 0.5
    assert samples["kvrecall_episode_failures_total", "worker_lost", "match"] == 1
    assert samples["kvrecall_turn_phase_seconds_count", "match"] == 3


async def rested(session: str) -> None:
    """Wait until nothing is done in a session in the background."""
    for task in asyncio.all_tasks():
        if task.get_name() == f"background {session}":
            await task


async def test_failures_are_counted_by_their_code(front) -> None:
    session = await front.session()
    front.worker.faults["turn"] = WorkerLost("gone")
    await front.say(session)
    front.worker.script = [[wire.ToolCall(id="c1", name="f", arguments="{}")]]
    front.worker.faults["repair"] = WorkerLost("gone")
    await front.say(session)
    await asyncio.wait(
        [task for task in asyncio.all_tasks() if task.get_name().startswith("background ")]
        or [asyncio.create_task(asyncio.sleep(0))]
    )
    samples = await scrape(front)
    assert samples["kvrecall_turn_failures_total", "worker_lost"] == 1
    assert samples["kvrecall_repair_failures_total", "worker_lost"] == 1


async def test_a_deleted_session_is_no_longer_counted(front) -> None:
    session = await front.session()
    await front.say(session)
    await front.http.delete(f"/v1/sessions/{session}")
    assert (await scrape(front))["kvrecall_active_rows",] == 0


async def test_each_worker_says_what_it_holds_and_what_its_tiers_did(front) -> None:
    front.worker.names = ["one", "two"]
    await front.session()
    samples = await scrape(front)
    for worker in ("one", "two"):
        assert samples["kvrecall_worker_up", worker] == 1
        assert samples["kvrecall_slots_in_use", worker] == 1
        assert samples["kvrecall_lost_pages_total", worker] == 3
        assert samples["kvrecall_rebuilt_pages_total", worker] == 2
        for name, value in (
            ("bytes", 640),
            ("limit_bytes", 1000),
            ("hits_total", 3),
            ("misses_total", 1),
        ):
            assert samples[f"kvrecall_tier_{name}", "ram", worker] == value
        for name, value in (
            ("errors", 2),
            ("refused_pages", 5),
            ("writes", 7),
            ("written_bytes", 512),
        ):
            assert samples[f"kvrecall_tier_{name}_total", "nvme", worker] == value
        assert samples["kvrecall_tier_write_seconds_total", "nvme", worker] == 0.5


async def test_of_a_worker_that_is_away_the_page_says_just_that(front) -> None:
    front.worker.names = ["one", "two"]
    await scrape(front)
    front.worker.names = ["one"]
    samples = await scrape(front)
    assert (samples["kvrecall_worker_up", "one"], samples["kvrecall_worker_up", "two"]) == (1, 0)
    assert ("kvrecall_slots_in_use", "two") not in samples
    front.worker.faults["stats"] = WorkerLost("gone")
    samples = await scrape(front)
    assert (samples["kvrecall_worker_up", "one"], samples["kvrecall_worker_up", "two"]) == (0, 0)


async def test_what_it_costs_that_workers_come_and_go_is_counted(front) -> None:
    front.worker.names = ["one", "two"]
    session = await front.session()
    front.worker.faults["done"] = WorkerLost("gone")
    await front.say(session)
    moved = await front.http.post(f"/v1/sessions/{session}/move", json={"worker": "one"})
    assert moved.json()["worker"] == "one"
    front.worker.sessions.clear()
    front.worker.faults["open"] = WorkerRefused(ErrorCode.ROWS_MISSING, "a page is gone")
    await front.say(session)
    samples = await scrape(front)
    assert samples["kvrecall_turn_retries_total", "worker_lost"] == 1
    assert samples["kvrecall_move_seconds_count",] == 1
    assert samples["kvrecall_rebuild_seconds_sum",] == 0.5
