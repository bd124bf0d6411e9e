"""Traces of real processes: one tree over both sides of the wire, exported to a receiver here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from faults.rig.ports import free_port
from kvrecall.telemetry.wire import PassingTracer, read_trace_headers
from kvrecall_server.app.tracing import build_tracer, wants_traces
from tests.end_to_end.servers import DEADLINE_SECONDS, Json, until
from tests.telemetry.collector import Collector, Exported
from tests.telemetry.conftest import Pair, ask, call_tool, read_lines

TEXT = "zebra quartz falconry"
RESULT = "the marmalade is in the cupboard"
STOP = "never-to-be-written"
WORDS = ("quartz", "marmalade", "cupboard", "never-to-be")
CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
TOOL = "5cf92f3577b34da6a3ce929d0e0e4736"
TOOL_SPAN = "11f067aa0ba902b7"
SERVER, INTERNAL, RPC_CLIENT = 2, 1, 3
TURNS = "POST /v1/sessions/{session}/turns"
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "50"}


def parent(trace: str, span: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{span}-01"}


def converse(url: str, collector: Collector) -> tuple[str, httpx.Headers]:
    """Run a turn, a pause with its tool, and the turn after it; returns session and first headers."""
    with httpx.Client(base_url=url, timeout=DEADLINE_SECONDS) as http:
        settings = {"budget": 128, "research": {"method": "snapkv", "repair_rows": 32}, "seed": 7}
        session = str(http.post("/v1/sessions", json=settings).raise_for_status().json()["id"])
        turns = f"/v1/sessions/{session}/turns"
        body: Json = {"messages": [ask(f"{TEXT} " * 30)], "max_tokens": 8}
        body |= {"stop": [STOP], "temperature": 0.5}
        first = http.post(turns, json=body, headers=parent(CLIENT, CLIENT_SPAN)).raise_for_status()
        asking = {"messages": [ask(TEXT), call_tool("c1", name=TEXT)], "generate": False}
        http.post(turns, json=asking).raise_for_status()
        until(lambda: len(collector.named("repair tool_call")) == 1, "the repair on the call")
        report: Json = {"type": "tool_call.started", "call_id": "c1"}
        events = f"/v1/sessions/{session}/events"
        http.post(events, json=report, headers=parent(TOOL, TOOL_SPAN)).raise_for_status()
        report = {"type": "tool_call.completed", "call_id": "c1", "result": RESULT}
        http.post(events, json=report, headers=parent(TOOL, TOOL_SPAN)).raise_for_status()
        last = {"messages": [], "max_tokens": 4, "wait_for_repairs": True}
        http.post(turns, json=last).raise_for_status()
        assert http.post(turns, json={"messages": [ask(TEXT)], "seed": TEXT}).status_code == 422
    return session, first.headers


class Traced:
    """The traffic's session, the first answer's headers, the collector, the processes' logs."""

    def __init__(self, pair: Pair, collector: Collector) -> None:
        self.session, self.headers = converse(pair.url, collector)
        self.collector = collector
        assert pair.stop() == (0, 0)  # what is left is exported
        self.gateway_lines = read_lines(pair.gateway.log)
        self.worker_lines = read_lines(pair.worker.log)

    def turn(self, number: int) -> tuple[Exported, Exported]:
        """The spans of a turn's request and of the turn itself."""
        (chat,) = [
            each
            for each in self.collector.named("chat reference")
            if each.attributes.get("kvrecall.turn") == number
        ]
        (request,) = [each for each in self.collector.spans() if each.id == chat.parent]
        return request, chat


@pytest.fixture(scope="module")
def traced(new_pair: Callable[..., Pair]) -> Iterator[Traced]:
    with Collector() as collector:
        pair = new_pair(OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, **FAST)
        yield Traced(pair, collector)


def test_a_turn_is_one_tree_from_the_clients_span_to_the_workers_phases(traced: Traced) -> None:
    request, chat = traced.turn(1)
    assert (request.name, request.kind, request.service) == (TURNS, SERVER, "kvrecall-gateway")
    assert (request.trace, request.parent) == (CLIENT, CLIENT_SPAN)
    assert (chat.trace, chat.kind) == (CLIENT, INTERNAL)
    below = traced.collector.below(chat)
    assert below[:3] == ["claim", "admission", "settle repairs"]
    # What the turn computed is taken while it is committed, or after.
    done = [name for name in below[3:] if name != "kvrecall.v1.Worker/TakeUsage"]
    assert done[-2:] == ["kvrecall.v1.Worker/Turn", "commit"]
    calls = [
        each for each in traced.collector.named("kvrecall.v1.Worker/Turn") if each.trace == CLIENT
    ]
    (sent,) = [each for each in calls if each.kind == RPC_CLIENT]
    (answered,) = [each for each in calls if each.kind == SERVER]
    assert (sent.parent, answered.parent) == (chat.id, sent.id)
    assert (sent.service, answered.service) == ("kvrecall-gateway", "kvrecall-worker")
    phases = traced.collector.below(answered)
    assert phases == ["queued", "swap in", "share", "prefill", "decode", "evict", "flush"]


def test_phases_have_the_times_that_the_worker_measured(traced: Traced) -> None:
    _, chat = traced.turn(1)
    sent = traced.collector.child(chat, "kvrecall.v1.Worker/Turn")
    answered = traced.collector.child(sent, "kvrecall.v1.Worker/Turn")
    spans = [
        traced.collector.child(answered, name)
        for name in ("queued", "prefill", "decode", "evict", "flush")
    ]
    for before, after in pairwise(spans):
        assert before.start <= before.end
        # One after the other, but for the clock's steps between two readings.
        assert after.start >= before.end - 1_000_000
    slack = 5_000_000  # nanoseconds between an end and its report to another thread
    assert answered.start - slack <= spans[0].start
    assert spans[-1].end <= answered.end + slack
    (turn,) = [line for line in traced.gateway_lines if line.get("turn") == 1]
    for span in spans[1:]:
        seconds = turn["seconds"][span.name]
        if span.name == "decode":  # its first token is a phase of its own in the turn's seconds
            seconds += turn["seconds"]["first_token"]
        assert (span.end - span.start) / 1e9 == pytest.approx(seconds, abs=1e-3)
    prefill, decode = spans[1], spans[2]
    blocks = [attributes["tokens"] for name, attributes in prefill.events if name == "block"]
    assert len(blocks) > 1
    assert sum(blocks) == turn["prompt_tokens"]
    assert [name for name, _ in decode.events] == ["first_token"]


def test_a_turn_has_the_attributes_of_the_conventions(traced: Traced) -> None:
    request, chat = traced.turn(1)
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["url.template"] == "/v1/sessions/{session}/turns"
    assert request.attributes["kvrecall.request_id"] == traced.headers["x-request-id"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvrecall",
        "gen_ai.request.model": "reference",
        "gen_ai.conversation.id": traced.session,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "kvrecall.budget": 128,
        "kvrecall.durable": True,
        "kvrecall.epoch": 1,
    }
    assert expected.items() <= chat.attributes.items()
    assert chat.attributes["kvrecall.evicted_tokens"] > 0
    assert chat.attributes["gen_ai.response.time_to_first_chunk"] > 0
    (turn,) = [line for line in traced.gateway_lines if line.get("turn") == 1]
    assert chat.attributes["gen_ai.usage.input_tokens"] == turn["prompt_tokens"]
    _, after = traced.turn(3)
    assert after.attributes["gen_ai.usage.cache_read.input_tokens"] > turn["prompt_tokens"]


def test_the_answer_and_the_logs_of_both_processes_name_the_trace(traced: Traced) -> None:
    request, _ = traced.turn(1)
    assert traced.headers["traceresponse"] == f"00-{CLIENT}-{request.id}-01"
    assert [line["code"] for line in traced.gateway_lines if line.get("turn") == 1] == ["ok"]
    for lines in (traced.gateway_lines, traced.worker_lines):
        assert [line for line in lines if line.get("trace_id") == CLIENT]


def test_repairs_are_traces_of_their_own_linked_to_what_made_them_due(traced: Traced) -> None:
    _, asking = traced.turn(2)
    (on_call,) = traced.collector.named("repair tool_call")
    assert (on_call.parent, on_call.links) == ("", ((asking.trace, asking.id),))
    assert on_call.trace != asking.trace
    assert on_call.attributes["kvrecall.repair.in_pause"] is True
    assert on_call.attributes["kvrecall.repair.promoted"] > 0
    (on_result,) = traced.collector.named("repair tool_result")
    requests = traced.collector.named("POST /v1/sessions/{session}/events")
    assert on_result.links == ((requests[1].trace, requests[1].id),)
    sent = traced.collector.child(on_result, "kvrecall.v1.Worker/Repair")
    answered = traced.collector.child(sent, "kvrecall.v1.Worker/Repair")
    assert answered.service == "kvrecall-worker"
    assert "queued" in traced.collector.below(answered)


def test_a_pause_is_a_span_below_the_clients_own(traced: Traced) -> None:
    (pause,) = traced.collector.named("execute_tool look_up")
    assert (pause.trace, pause.parent) == (TOOL, TOOL_SPAN)
    assert pause.attributes["gen_ai.tool.name"] == "look_up"
    assert pause.attributes["gen_ai.tool.call.id"] == "c1"
    started, completed = traced.collector.named("POST /v1/sessions/{session}/events")
    assert (started.trace, started.parent) == (TOOL, TOOL_SPAN)
    assert started.start <= pause.start <= started.end
    assert completed.start <= pause.end <= completed.end


def test_no_text_of_the_conversation_is_exported(traced: Traced) -> None:
    assert len(traced.collector.spans()) > 30
    exported = b"".join(traced.collector.bodies)
    assert [word for word in WORDS if word.encode() in exported] == []


def test_probes_begin_no_trace_and_a_refused_request_has_its_status(traced: Traced) -> None:
    names = {span.name for span in traced.collector.spans()}
    assert not {name for name in names if "readyz" in name or "metrics" in name}
    assert not {name for name in names if "Stats" in name or "Describe" in name}
    statuses = [
        span.attributes["http.response.status_code"] for span in traced.collector.named(TURNS)
    ]
    assert statuses == [200, 200, 200, 422]
    failed = [(each.name, each.attributes) for each in traced.collector.spans() if each.failed]
    assert failed == []


@pytest.mark.parametrize("status", [500, None], ids=["broken", "absent"])
def test_a_collector_that_takes_nothing_disturbs_no_turn(
    new_pair: Callable[..., Pair], status: int | None
) -> None:
    with Collector(status or 200) as collector:
        endpoint = collector.endpoint if status else f"http://127.0.0.1:{free_port()}"
        pair = new_pair(
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint.replace("//", "//user:swordfish@"), **FAST
        )
        client = pair.client()
        session = client.create_session(budget=128, seed=7).id
        turns = [client.turn(session, [ask(TEXT)], max_tokens=4).turn for _ in range(3)]
        assert turns == [1, 2, 3]
        failed = "opentelemetry.exporter"
        until(lambda: failed in pair.gateway.log.read_text(encoding="utf-8"), "a failed export")
        assert pair.stop() == (0, 0)
    lines = read_lines(pair.gateway.log)
    assert not [line for line in lines if line["level"] == "critical"]
    assert "swordfish" not in pair.gateway.log.read_text(encoding="utf-8")


PROGRAM = """
import asyncio, json, sys
from kvrecall_server.app.logs import set_up_logs
from kvrecall_server.app.tracing import build_tracer
set_up_logs("json")
tracer = build_tracer(sys.argv[1])
if sys.argv[1] == "gateway":
    import gateway.app, services.cluster.pool
else:
    import workers.rpc.server, kvrecall_server.app.wiring
print(json.dumps(sorted(name for name in sys.modules if name.startswith("opentelemetry"))))
"""


@pytest.mark.parametrize("component", ["gateway", "worker"])
def test_the_sdk_is_imported_only_where_traces_are_asked_for(component: str) -> None:
    def imported(**environment: str) -> set[str]:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, component],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=True,
            env={**clean_environment(), **environment},
        )
        return set(json.loads(run.stdout))

    # FastAPI and redis-py import the API by themselves, and the names of its variables.
    used = {"opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter"}
    assert used <= imported(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    off = imported()
    assert not {
        name
        for name in off
        if name.startswith(
            ("opentelemetry.sdk.trace", "opentelemetry.exporter", "opentelemetry.proto")
        )
    }


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_the_standard_variables_switch_traces_on_and_off(environment: Any, wanted: bool) -> None:
    assert wants_traces(environment) is wanted


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "carrier-pigeon"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"},
    ],
)
def test_an_exporter_that_is_not_there_leaves_traces_off(environment: Any) -> None:
    assert isinstance(build_tracer("gateway", environment), PassingTracer)


@pytest.mark.parametrize(
    "sent",
    [
        "",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        f"00-{CLIENT}-{CLIENT_SPAN}-01\x00",
    ],
)
def test_a_malformed_trace_context_is_not_handed_on(sent: str) -> None:
    assert read_trace_headers({"traceparent": sent, "tracestate": "a=1"}) == {}


def test_a_trace_state_that_a_wire_refuses_is_left_out() -> None:
    good = parent(CLIENT, CLIENT_SPAN)
    assert read_trace_headers({**good, "tracestate": "a=1"}) == {**good, "tracestate": "a=1"}
    assert read_trace_headers({**good, "tracestate": "a=\u00e9"}) == good
