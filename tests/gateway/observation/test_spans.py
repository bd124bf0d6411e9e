"""Spans of requests as the application makes them, over a stub worker and real code of the SDK."""

from typing import Any

import pytest

from kvrecall.domain.errors import WorkerLost

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
SENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture
def traces() -> bool:
    return True


def named(exported: Any, name: str) -> list[Any]:
    return [span for span in exported.get_finished_spans() if span.name == name]


async def test_a_request_goes_on_with_the_clients_trace_and_names_its_span(
    api: Any, exported: Any
) -> None:
    answer = await api.http.get("/v1/methods", headers=SENT)
    (span,) = named(exported, "GET /v1/methods")
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SPAN
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{span.context.span_id:016x}-01"


async def test_a_request_without_a_trace_begins_one(api: Any, exported: Any) -> None:
    answer = await api.http.get("/v1/methods")
    (span,) = named(exported, "GET /v1/methods")
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" in answer.headers["traceresponse"]


async def test_a_trace_that_the_client_does_not_sample_is_not_recorded(
    api: Any, exported: Any
) -> None:
    answer = await api.http.get("/v1/methods", headers={"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert answer.headers["traceresponse"].startswith(f"00-{TRACE}-")
    assert exported.get_finished_spans() == ()


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_probes_have_no_span(api: Any, exported: Any, path: str) -> None:
    answer = await api.http.get(path, headers=SENT)
    assert answer.status_code == 200
    assert "traceresponse" not in answer.headers
    assert exported.get_finished_spans() == ()


async def test_what_a_client_writes_into_a_path_is_not_recorded(api: Any, exported: Any) -> None:
    for path in ("/quartz", "/v1/sessions/quartz", "/v1/sessions?cursor=quartz"):
        await api.http.get(path)
    answer = await api.http.post(
        "/v1/sessions/quartz/turns",
        json={"messages": [{"role": "user", "content": "quartz"}]},
        headers={"Idempotency-Key": "quartz"},
    )
    assert answer.status_code == 404
    spans = exported.get_finished_spans()
    assert len(named(exported, f"chat {api.service.info.model}")) == 1
    assert [each for each in spans if "quartz" in each.to_json()] == []


async def test_a_failed_turn_has_its_code_and_no_message(api: Any, exported: Any) -> None:
    session = await api.session()
    api.worker.faults["turn"] = WorkerLost("the quartz is broken")
    assert (await api.turn(session)).status_code == 503
    (chat,) = named(exported, f"chat {api.service.info.model}")
    assert chat.attributes["error.type"] == "worker_lost"
    assert chat.attributes["gen_ai.conversation.id"] == session
    assert chat.status.description is None
    (request,) = named(exported, "POST /v1/sessions/{session}/turns")
    assert request.attributes["error.type"] == "503"
    assert not request.status.is_ok
    assert "quartz" not in chat.to_json()


async def test_a_method_that_a_client_made_up_is_not_recorded(api: Any, exported: Any) -> None:
    await api.http.request("QUARTZ", "/v1/methods")
    (span,) = exported.get_finished_spans()
    assert span.attributes["http.request.method"] == "_OTHER"
    assert "QUARTZ" not in span.to_json()


async def test_a_stream_is_said_to_be_one(api: Any, exported: Any) -> None:
    session = await api.session()
    await api.turn(session, stream=True)
    (request,) = named(exported, "POST /v1/sessions/{session}/turns")
    assert request.attributes["gen_ai.request.stream"] is True


async def test_a_fork_runs_under_its_request(api: Any, exported: Any) -> None:
    session = await api.session()
    await api.turn(session)
    await api.http.post(f"/v1/sessions/{session}/fork", json={})
    (fork,) = named(exported, "fork")
    (request,) = named(exported, "POST /v1/sessions/{session}/fork")
    assert fork.parent.span_id == request.context.span_id
