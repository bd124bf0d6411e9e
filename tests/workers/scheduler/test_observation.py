"""Spans and log lines of jobs that run together: each job's are those of its own caller."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import LogCapture

from kvrecall.telemetry.otel import OtelTracer
from kvrecall.telemetry.spans import under
from workers.generation.sampling import Sampler

NAMES = ("a", "b", "c")


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def submit(
    exported: InMemorySpanExporter, make_worker: Callable[..., Any], words: Callable[..., str]
) -> Callable[..., dict[str, Future[Any]]]:
    """submit(): a turn in each session at the same time, each under a span and a request's id."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    tracer = OtelTracer(provider)
    worker = make_worker(block_tokens=24, recent=8, slots=2)

    def submit() -> dict[str, Future[Any]]:
        turns = {}
        for name in NAMES:
            worker.open(name, method="snapkv", budget=60)
            with (
                structlog.contextvars.bound_contextvars(request_id=f"of {name}"),
                under(tracer.begin(f"call {name}", "server", {})),
            ):
                turns[name] = worker.submit(name, words(40, seed=1), max_tokens=12)
        wait(turns.values(), timeout=600)
        return turns

    return submit


def test_each_jobs_phases_are_below_its_own_callers_span(
    submit: Callable[[], dict[str, Future[Any]]], exported: InMemorySpanExporter
) -> None:
    turns = submit()
    ended: Any = exported.get_finished_spans()
    calls = {span.name: span for span in ended if span.name.startswith("call ")}
    for name, turn in turns.items():
        own = calls[f"call {name}"].context
        below = [span for span in ended if span.parent and span.parent.span_id == own.span_id]
        assert {span.context.trace_id for span in below} == {own.trace_id}
        seconds = turn.result().seconds
        # Three sessions for two slots: one of them waited, and all were swapped in.
        expected = ["queued", "swap in", "share", "prefill", "decode", "evict", "flush"]
        assert [span.name for span in sorted(below, key=lambda each: each.start_time)] == expected
        decode = next(span for span in below if span.name == "decode")
        recorded = (decode.end_time - decode.start_time) / 1e9
        assert recorded == pytest.approx(seconds["decode"] + seconds["first_token"], abs=1e-3)


def test_a_failed_jobs_line_has_the_ids_of_its_own_request(
    submit: Callable[[], dict[str, Future[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = LogCapture()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, lines])
    accept = Sampler.accept
    failed: list[int] = []

    def fail_once(sampler: Sampler, token: int) -> None:
        accept(sampler, token)
        if not failed:
            failed.append(token)
            raise RuntimeError("a broken grammar")

    monkeypatch.setattr(Sampler, "accept", fail_once)
    turns = submit()
    (name,) = [name for name, turn in turns.items() if turn.exception() is not None]
    (line,) = [each for each in lines.entries if each["event"] == "job failed"]
    assert (line["session"], line["request_id"]) == (name, f"of {name}")
