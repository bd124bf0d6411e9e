"""Metrics page: every event of the service is counted."""

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as pb


async def scrape(api: Any) -> dict[tuple[str, ...], float]:
    """Return every sample of the page by its name and label values."""
    page = await api.http.get("/metrics")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(page.text)
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


async def test_turns_phases_and_rows_are_counted(api: Any) -> None:
    one = await api.session()
    other = await api.session(budget=16)
    api.worker.script = ["a b", "c " * 30]
    await api.turn(one)
    await api.turn(other)
    await api.turn(one, generate=False)
    samples = await scrape(api)
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


async def test_repairs_and_promotions_are_counted(api: Any) -> None:
    session = await api.session()
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")]]
    await api.turn(session)
    event = {"type": "tool_call.completed", "call_id": "c1", "result": "a"}
    await api.http.post(f"/v1/sessions/{session}/events", json=event)
    await api.http.post(f"/v1/sessions/{session}/turns", json={"wait_for_repairs": True})
    samples = await scrape(api)
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


async def test_repairs_ended_in_their_pause_or_by_a_turn_are_counted_separately(
    api: Any,
) -> None:
    session = await api.session()
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")]]
    await api.turn(session)
    await wait_until_idle(session)
    api.worker.gates["repair"] = asyncio.Event()
    api.worker.reached["repair"].clear()
    for result in (
        {"type": "tool_call.delta", "delta": "a" * 300},
        {"type": "tool_call.completed", "result": "a"},
    ):
        await api.http.post(f"/v1/sessions/{session}/events", json={"call_id": "c1", **result})
        await api.worker.reached["repair"].wait()
    await api.http.post(f"/v1/sessions/{session}/turns", json={})
    samples = await scrape(api)
    assert samples["kvrecall_repairs_between_turns_total", "end"] == 1
    assert samples["kvrecall_repairs_between_turns_total", "turn"] == 1
    assert samples["kvrecall_repairs_left_out_total",] == 1
    assert samples["kvrecall_repairs_cut_total", "tool_delta"] == 1
    assert samples["kvrecall_repair_share_scanned_sum",] == 1.5


async def test_pauses_that_time_out_are_counted(api: Any) -> None:
    session = await api.session()
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")]]
    await api.turn(session)
    api.service._timeouts._seconds = 0.0
    async with asyncio.timeout(60):
        # A second sweep confirms what the first has found, unless a repair has ended in between.
        while (await scrape(api))["kvrecall_pauses_timed_out_total",] != 1:
            await api.service._timeouts.sweep()
    shown = (await api.http.get(f"/v1/sessions/{session}")).json()
    assert [call["status"] for call in shown["pending_calls"]] == ["timed_out"]


async def test_episode_switches_and_their_rows_are_counted(api: Any) -> None:
    settings = {"count": 2, "segment_utterances": 2, "medoid_utterances": 2, "rebuild_growth": 9}
    session = await api.session(method="epicache", budget=16, repair_rows=0, episodes=settings)
    for text in ("kettle leaves cup", "station rails ticket") * 3:
        api.worker.script = [text]
        await api.turn(session, text)
        await wait_until_idle(session)
    await api.turn(session, "station rails")
    await wait_until_idle(session)
    api.worker.faults["embed"] = WorkerLost("gone")
    await api.turn(session, "kettle")
    samples = await scrape(api)
    assert samples["kvrecall_episode_matches_total",] == 3
    assert samples["kvrecall_episode_switches_total",] == 2
    assert samples["kvrecall_episode_moved_rows_total",] == 40
    assert samples["kvrecall_episode_moved_bytes_total",] == 2560
    assert samples["kvrecall_episode_build_seconds_sum",] == 0.5
    assert samples["kvrecall_episode_failures_total", "worker_lost", "match"] == 1
    assert samples["kvrecall_turn_phase_seconds_count", "match"] == 3


async def wait_until_idle(session: str) -> None:
    """Wait for the background tasks of a session."""
    for task in asyncio.all_tasks():
        if task.get_name() == f"background {session}":
            await task


async def test_failures_are_counted_by_their_code(api: Any) -> None:
    session = await api.session()
    api.worker.faults["turn"] = WorkerLost("gone")
    await api.turn(session)
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")]]
    api.worker.faults["repair"] = WorkerLost("gone")
    await api.turn(session)
    await asyncio.wait(
        [task for task in asyncio.all_tasks() if task.get_name().startswith("background ")]
        or [asyncio.create_task(asyncio.sleep(0))]
    )
    samples = await scrape(api)
    assert samples["kvrecall_turn_failures_total", "worker_lost"] == 1
    assert samples["kvrecall_repair_failures_total", "worker_lost"] == 1


async def test_a_deleted_session_is_no_longer_counted(api: Any) -> None:
    session = await api.session()
    await api.turn(session)
    await api.http.delete(f"/v1/sessions/{session}")
    assert (await scrape(api))["kvrecall_active_rows",] == 0


async def test_each_worker_reports_its_slots_and_tiers(api: Any) -> None:
    api.worker.names = ["one", "two"]
    await api.session()
    samples = await scrape(api)
    for worker in ("one", "two"):
        assert samples["kvrecall_worker_up", worker] == 1
        assert samples["kvrecall_slots_in_use", worker] == 1
        assert samples["kvrecall_lost_pages_total", worker] == 3
        assert samples["kvrecall_rebuilt_pages_total", worker] == 2
        assert samples["kvrecall_prefilled_tokens_total", worker] == 11
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


async def test_an_unreachable_worker_is_reported_as_down_only(api: Any) -> None:
    api.worker.names = ["one", "two"]
    await scrape(api)
    api.worker.names = ["one"]
    samples = await scrape(api)
    assert (samples["kvrecall_worker_up", "one"], samples["kvrecall_worker_up", "two"]) == (1, 0)
    assert ("kvrecall_slots_in_use", "two") not in samples
    api.worker.faults["stats"] = WorkerLost("gone")
    samples = await scrape(api)
    assert (samples["kvrecall_worker_up", "one"], samples["kvrecall_worker_up", "two"]) == (0, 0)


async def test_retries_moves_and_rebuilds_are_counted(api: Any) -> None:
    api.worker.names = ["one", "two"]
    session = await api.session()
    api.worker.faults["done"] = WorkerLost("gone")
    await api.turn(session)
    moved = await api.http.post(f"/v1/sessions/{session}/move", json={"worker": "one"})
    assert moved.json()["worker"] == "one"
    api.worker.sessions.clear()
    api.worker.faults["open"] = WorkerRefused(ErrorCode.ROWS_MISSING, "a page is gone")
    await api.turn(session)
    samples = await scrape(api)
    assert samples["kvrecall_turn_retries_total", "worker_lost"] == 1
    assert samples["kvrecall_move_seconds_count",] == 1
    assert samples["kvrecall_rebuild_seconds_sum",] == 0.5
