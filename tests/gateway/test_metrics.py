"""Metrics page: every event of the service is counted."""

import asyncio
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics.recorder import get_fault
from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.errors import CatalogError, WorkerLost, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as pb

UP = "kvrecall_worker_up"


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
    assert samples["kvrecall_turn_phase_seconds_count", "commit"] == 3
    assert samples["kvrecall_turn_seconds_count", "stop"] == 2
    assert samples["kvrecall_time_to_first_token_seconds_count", "turn"] == 2
    assert samples["kvrecall_time_per_output_token_seconds_count",] == 2
    assert samples["kvrecall_turn_tokens_sum", "output"] == 32
    assert samples["kvrecall_remembered_tokens_total",] == 2 + 2
    assert samples["kvrecall_turns_not_durable_total",] == 0
    route = "/v1/sessions/{session}/turns"
    assert samples["kvrecall_http_requests_total", "POST", route, "200"] == 3
    assert samples["kvrecall_http_request_seconds_count", "POST", route] == 3


async def test_a_turn_whose_rows_are_in_memory_only_is_counted(api: Any) -> None:
    api.worker.durable = False
    await api.turn(await api.session())
    assert (await scrape(api))["kvrecall_turns_not_durable_total",] == 1


async def test_the_gauges_are_those_of_the_moment(api: Any) -> None:
    waiting = await api.session()
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")]]
    await api.turn(waiting)
    await api.session()
    samples = await scrape(api)
    assert samples["kvrecall_sessions", "paused"] == 1
    assert samples["kvrecall_sessions", "idle"] == 1
    assert samples["kvrecall_turns_running",] == 0
    limits = api.service.limits
    assert samples["kvrecall_turns_limit", "running"] == limits.max_running_turns
    assert samples["kvrecall_http_in_flight",] == 1, "the scrape itself"


async def test_paths_that_match_no_route_share_a_label(api: Any) -> None:
    for path in ("/secret-key", "/v1/no/such/route"):
        assert (await api.http.get(path)).status_code == 404
    samples = await scrape(api)
    assert samples["kvrecall_http_requests_total", "GET", "unmatched", "404"] == 2
    assert not any("secret-key" in part for key in samples for part in key)


async def test_openmetrics_is_sent_to_those_who_ask_for_it(api: Any) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    page = await api.http.get("/metrics", headers={"accept": accept})
    assert page.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name for family in openmetrics_families(page.text)}
    assert {"kvrecall_turns", "kvrecall_build_info", "process_cpu_seconds"} <= families
    assert not any(name.endswith("_created") for name in families)


async def test_a_turns_trace_is_the_exemplar_of_its_times(api: Any) -> None:
    session = await api.session()
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    turn = await api.http.post(f"/v1/sessions/{session}/turns", json=body, headers=headers)
    assert turn.status_code == 200
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    page = (await api.http.get("/metrics", headers=accept)).text
    traced = {
        sample.name
        for family in openmetrics_families(page)
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels == {"trace_id": trace}
    }
    assert traced == {
        "kvrecall_turn_seconds_bucket",
        "kvrecall_time_to_first_token_seconds_bucket",
    }


async def test_known_series_are_there_before_their_first_event(api: Any) -> None:
    samples = await scrape(api)
    for reason in ("stop", "length", "tool_calls", "appended"):
        assert samples["kvrecall_turns_total", reason] == 0
    assert samples["kvrecall_repairs_between_turns_total", "end"] == 0
    assert samples["kvrecall_takeovers_total", "move"] == 0


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
        ("repair_candidate_tokens", 8),
        ("repair_scored_tokens", 8),
        ("repair_promoted_tokens", 2),
        ("repair_demoted_rows", 1),
    ):
        assert samples[f"kvrecall_{name}_total", "tool_result"] == value
    assert samples["kvrecall_repair_read_bytes_total", "tool_call"] == 640
    assert samples["kvrecall_repairs_cut_total", "tool_call"] == 0
    assert samples["kvrecall_repair_scanned_ratio_count",] == 2


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
    assert samples["kvrecall_repair_scanned_ratio_sum",] == 1.5


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


async def test_reports_on_tool_calls_are_counted_and_late_ones_apart(api: Any) -> None:
    session = await api.session()
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")]]
    await api.turn(session)
    done = {"type": "tool_call.completed", "call_id": "c1", "result": "rain"}
    started = {"type": "tool_call.started", "call_id": "c1"}
    for event in (started, done, done, started):
        answer = await api.http.post(f"/v1/sessions/{session}/events", json=event)
        assert answer.status_code == 200
    samples = await scrape(api)
    counted = {
        (kind, late): samples["kvrecall_tool_events_total", late, kind]
        for kind in ("tool_call.started", "tool_call.delta", "tool_call.completed")
        for late in ("false", "true")
    }
    assert counted == {
        ("tool_call.started", "false"): 1,
        ("tool_call.started", "true"): 1,
        ("tool_call.delta", "false"): 0,
        ("tool_call.delta", "true"): 0,
        ("tool_call.completed", "false"): 1,
        ("tool_call.completed", "true"): 0,
    }, "the same result again is no news, and not late"


async def test_streams_of_events_are_counted_while_they_are_open(api: Any) -> None:
    subscription = api.service.feed.subscribe("")
    assert (await scrape(api))["kvrecall_event_streams",] == 1
    api.service.feed.remove(subscription)
    assert (await scrape(api))["kvrecall_event_streams",] == 0


async def test_episode_switches_and_their_rows_are_counted(api: Any) -> None:
    session = await api.session(method="epicache", budget=80, repair_rows=0, episodes={"count": 2})
    tea, trains = "kettle leaves cup", "station rails ticket"
    for text in [*[tea, tea, trains, trains] * 3, tea, trains]:
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
    assert samples["kvrecall_turn_failures_total", "worker_lost", "service"] == 1
    assert samples["kvrecall_repair_failures_total", "worker_lost"] == 1


async def test_errors_are_counted_by_who_has_to_act(api: Any) -> None:
    session = await api.session()
    api.worker.script = [[pb.ToolCall(id="c1", name="f", arguments="{}")]]
    await api.turn(session)
    await api.turn(session)  # without the result that the session waits for
    samples = await scrape(api)
    assert samples["kvrecall_turn_failures_total", "calls_outstanding", "client"] == 1
    assert get_fault("overloaded") == get_fault("quota_exceeded") == "capacity"
    assert get_fault("cancelled") == "client"
    assert get_fault("catalog_error") == "service"


async def test_a_lost_worker_is_shown_as_down_until_it_leaves_on_purpose(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer_nothing() -> None:
        raise WorkerLost("gone")

    api.worker.names = ["one", "two"]
    await scrape(api)
    api.worker.names = ["one"]
    samples = await scrape(api)
    assert (samples["kvrecall_worker_up", "one"], samples["kvrecall_worker_up", "two"]) == (1, 0)
    with monkeypatch.context() as patch:
        patch.setattr(api.worker, "workers", answer_nothing)
        samples = await scrape(api)
    assert (samples["kvrecall_worker_up", "one"], samples["kvrecall_worker_up", "two"]) == (0, 0)
    api.worker.names = ["one", "two"]
    api.worker.draining = {"two"}
    await scrape(api)
    api.worker.names = ["one"]
    samples = await scrape(api)
    assert samples["kvrecall_worker_up", "one"] == 1
    assert ("kvrecall_worker_up", "two") not in samples


async def test_a_worker_under_a_new_name_takes_the_place_of_the_one_that_was_lost_first(
    api: Any,
) -> None:
    """A container that is created again announces another address."""

    async def find_up(*names: str) -> dict[str, float]:
        api.worker.names = list(names)
        samples = await scrape(api)
        return {name: samples[key] for key in samples if key[0] == UP for name in key[1:]}

    assert await find_up("one", "two", "three") == {"one": 1, "two": 1, "three": 1}
    assert await find_up("one", "three") == {"one": 1, "two": 0, "three": 1}
    assert await find_up("three") == {"one": 0, "two": 0, "three": 1}
    assert await find_up("three", "four") == {"one": 0, "three": 1, "four": 1}
    assert await find_up("three", "four", "two") == {"two": 1, "three": 1, "four": 1}
    assert await find_up("three", "five", "two") == {"two": 1, "three": 1, "five": 1}
    assert await find_up("three", "five") == {"two": 0, "three": 1, "five": 1}
    api.worker.draining = {"six"}
    assert (await find_up("three", "five", "six"))["two"] == 0, "it will not stay"


async def test_calls_of_the_catalog_are_timed_and_its_failures_counted(api: Any) -> None:
    session = await api.session()
    await api.turn(session)
    before = await scrape(api)
    for op in ("read", "claim", "commit"):
        assert before["kvrecall_catalog_seconds_count", op] > 0
        assert before["kvrecall_catalog_errors_total", op] == 0

    async def fail(*_: Any) -> None:
        raise CatalogError("the disk is full")

    api.catalog.turns.commit = fail
    await api.turn(session)
    after = await scrape(api)
    assert after["kvrecall_catalog_errors_total", "commit"] == 1


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
    assert samples["kvrecall_takeovers_total", "first_use"] == 0, "its creation is no takeover"
    assert samples["kvrecall_takeovers_total", "worker_lost"] == 1
    assert samples["kvrecall_takeovers_total", "move"] == 1
    assert samples["kvrecall_takeovers_total", "rollback"] == 1
    assert samples["kvrecall_rebuild_seconds_sum",] == 0.5
