"""The current span: new ones below it and linked to it, and nothing at all where nobody traces."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrecall.domain.errors import WorkerLost
from kvrecall.telemetry.otel import OtelTracer
from kvrecall.telemetry.spans import NO_SPAN, PassedSpan, current_span, span, under
from kvrecall.telemetry.stopwatch import Stopwatch
from kvrecall.telemetry.wire import PassingTracer, read_request_id, write_ids

SENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exported: InMemorySpanExporter) -> OtelTracer:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return OtelTracer(provider)


def by_name(exported: InMemorySpanExporter) -> dict[str, Any]:
    return {each.name: each for each in exported.get_finished_spans()}


def test_a_span_is_below_the_current_one_and_current_in_its_block(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    with under(tracer.begin("request", "server", SENT)) as request:
        with span("outer") as outer:
            assert current_span() is outer
            with span("inner"):
                pass
        assert current_span() is request
    assert current_span() is NO_SPAN
    found = by_name(exported)
    assert found["inner"].parent.span_id == found["outer"].context.span_id
    assert found["outer"].parent.span_id == found["request"].context.span_id
    assert f"{found['request'].parent.span_id:016x}" == "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerLost("secret"), "worker_lost"),
        (ValueError("secret"), "ValueError"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_an_error_ends_a_span_with_its_code_and_goes_on(
    tracer: OtelTracer, exported: InMemorySpanExporter, error: BaseException, code: str
) -> None:
    with pytest.raises(type(error)), under(tracer.begin("request", "server", {})):
        raise error
    found = by_name(exported)["request"]
    assert found.attributes["error.type"] == code
    assert not found.status.is_ok
    assert "secret" not in found.to_json()


def test_what_a_span_only_caused_is_a_trace_of_its_own_with_a_link(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    cause = tracer.begin("turn", "server", {})
    cause.end()
    with under(cause.follow("repair")):
        pass
    found = by_name(exported)
    assert found["repair"].parent is None
    assert found["repair"].context.trace_id != found["turn"].context.trace_id
    assert found["repair"].links[0].context.span_id == found["turn"].context.span_id


def test_a_span_that_is_over_may_lie_below_the_callers(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    for headers, name in ((SENT, "with"), ({}, "without")):
        request = tracer.begin(name, "server", headers)
        request.record(f"tool {name}", 10.0, 12.5, beside=True)
        request.end()
    found = by_name(exported)
    assert f"{found['tool with'].parent.span_id:016x}" == "00f067aa0ba902b7"
    assert found["tool without"].parent.span_id == found["without"].context.span_id
    tool = found["tool with"]
    assert (tool.start_time, tool.end_time) == (10_000_000_000, 12_500_000_000)


def test_where_nobody_traces_the_callers_span_is_handed_on_unchanged() -> None:
    passed = PassingTracer().begin("request", "server", {**SENT, "other": "header"})
    assert isinstance(passed, PassedSpan)
    assert passed.trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"
    with under(passed), span("below"), under(current_span().follow("repair")):
        assert current_span().headers() == SENT
    assert PassingTracer().begin("request", "server", {}) is NO_SPAN


def test_a_call_carries_the_ids_of_request_and_span(tracer: OtelTracer) -> None:
    own = tracer.begin("request", "server", SENT)
    with structlog.contextvars.bound_contextvars(request_id="r-1"):
        metadata = dict(write_ids(own))
    assert read_request_id(metadata) == "r-1"
    assert metadata["traceparent"].split("-")[1] == own.trace_id
    assert write_ids(NO_SPAN) == ()


@given(st.text().filter(lambda text: not text.isascii() or " " in text or "\n" in text))
def test_a_request_id_that_is_no_plain_text_is_not_read(text: str) -> None:
    assert read_request_id({"x-request-id": text}) == ""


def test_phases_are_counted_and_recorded_one_after_the_other(
    tracer: OtelTracer, exported: InMemorySpanExporter
) -> None:
    watch = Stopwatch[str]()
    with under(tracer.begin("turn", "server", {})):
        watch.mark("block", tokens=64)
        watch.lap("prefill")
        watch.split("first_token")
        watch.lap("decode")
        watch.lap("decode")
    assert set(watch.seconds) == {"prefill", "first_token", "decode"}
    ended: Any = exported.get_finished_spans()
    prefill, decode, again, turn = ended
    assert [each.name for each in (prefill, decode, again)] == ["prefill", "decode", "decode"]
    assert [(event.name, event.attributes["tokens"]) for event in prefill.events] == [("block", 64)]
    assert [event.name for event in decode.events] == ["first_token"]
    assert again.events == ()
    assert {each.parent.span_id for each in (prefill, decode, again)} == {turn.context.span_id}
    # The first token's time is in the decode span, which begins where the prefill ended.
    recorded = (decode.end_time - decode.start_time + again.end_time - again.start_time) / 1e9
    counted = watch.seconds["first_token"] + watch.seconds["decode"]
    assert recorded == pytest.approx(counted, abs=1e-4)
    seconds, starts = watch.seconds, watch.starts
    assert starts["prefill"] == 0.0
    assert starts["first_token"] == pytest.approx(seconds["prefill"])
    # Its first beginning, though it was counted twice.
    assert starts["decode"] == pytest.approx(seconds["prefill"] + seconds["first_token"])


class StuckExporter(SpanExporter):
    """An exporter whose collector does not answer until `released`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.reached.set()
        self.released.wait()
        return SpanExportResult.SUCCESS


def test_a_collector_that_does_not_answer_holds_up_no_exit() -> None:
    stuck = StuckExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(stuck, schedule_delay_millis=1))
    tracer = OtelTracer(provider)
    tracer.begin("request", "server", {}).end()
    assert stuck.reached.wait(60)
    tracer.close(0.05)
    assert not stuck.released.is_set()
    stuck.released.set()
