"""The operator's drill in short, and its counts."""

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from faults.findings import Findings
from faults.rig.setups import Rig
from faults.rolling.balancer import BalancedTransport, Balancer, describe_error
from faults.rolling.drill import Drill, Plan
from faults.rolling.outcome import Done, Outcome
from faults.rolling.report import print_outcome, show_counts
from faults.rolling.tally import ANSWERED, Tally, Wait


def test_nothing_is_lost_in_a_rolling_upgrade_and_after_kills(root: Path, rig: Rig) -> None:
    plan = Plan(clients=2, calm_seconds=0.0, kinds=("kill", "upgrade"))
    outcome = Drill(root / "rolling", rig, plan).run()
    assert not outcome.lost
    assert not outcome.doubled
    assert not any(outcome.findings.failures.values()), outcome.findings.failures
    assert [(step.done, step.process) for step in outcome.steps] == [
        ("nothing", "all"),
        *(("kill -9, start", name) for name in ("worker-1", "gateway-1", "redis")),
        *(("rolling upgrade", name) for name in ("worker-1", "worker-2", "gateway-1", "gateway-2")),
    ]
    assert outcome.turns >= 2 * len(outcome.steps), "every client is answered after every step"
    tally = outcome.tally
    assert tally.count_recovered(tally.errors) == len(tally.errors)


@pytest.fixture
def tally() -> Tally:
    """A request that the library repeated, and a stream that broke and was repeated by the user."""
    tally = Tally()
    tally.respond("one", 1.0, "503 worker_lost")
    tally.respond("one", 2.0, ANSWERED)
    tally.answer("one", Wait(0.5, 1.5, "a"))
    tally.respond("two", 3.0, ANSWERED)
    tally.repeat("two", 3.5, "stream_broken")
    tally.respond("two", 4.0, ANSWERED)
    tally.answer("two", Wait(3.0, 2.0, "b"))
    return tally


def test_errors_that_the_library_repeated_and_those_within_streams_are_counted_once(
    tally: Tally,
) -> None:
    assert [seen.text for seen in tally.errors] == ["503 worker_lost", "stream_broken"]
    assert tally.repeated == {"stream_broken": 1}
    assert tally.count_recovered(tally.errors) == 2
    assert tally.unexpected() == []


def test_an_error_that_reaches_the_user_after_the_library_saw_it_is_counted_once() -> None:
    tally = Tally()
    tally.respond("one", 1.0, "500 worker_error")
    tally.repeat("one", 1.0, "500 worker_error")
    assert [seen.text for seen in tally.errors] == tally.unexpected() == ["500 worker_error"]
    assert tally.count_recovered(tally.errors) == 0


def test_a_wait_belongs_to_every_step_that_it_lasted_through(tally: Tally) -> None:
    assert tally.longest_wait(0.0, 1.0) == 1.5
    assert tally.longest_wait(1.9, 3.5) == 2.0
    assert tally.longest_wait(6.0, 9.0) == 0.0
    assert tally.clients_since(1.0) == {"b"}


def test_what_is_lost_doubled_or_wrong_fails_the_drill(tally: Tally) -> None:
    steps = [Done("kill -9, start", "redis", 0.0, 2.5, 3.2)]
    outcome = Outcome(steps, tally, 2, [], [], Findings())
    assert outcome.clean
    assert not replace(outcome, lost=["turn 1"]).clean
    assert not replace(outcome, doubled=["turn 1"]).clean
    findings = Findings()
    findings.fail("bad exits", ["worker-1"])
    assert not replace(outcome, findings=findings).clean
    step, *totals = outcome.build_rows()
    assert (step["value"], step["errors"], step["longest_wait"]) == (
        2.5,
        {"503 worker_lost": 1},
        2.0,
    )
    values = {row["metric"]: row["value"] for row in totals}
    assert values["errors seen by clients"] == values["errors retried with success"] == 2
    assert values["wait, longest"] == 2.0
    console = Console(record=True, width=200)
    print_outcome(outcome, console)
    assert "1 x 503 worker_lost" in console.export_text()
    assert show_counts({}) == "none"


@pytest.fixture
def balancer(monkeypatch: pytest.MonkeyPatch) -> Balancer:
    """A balancer over two addresses, of which the second refuses connections."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "b":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"host": request.headers["Host"]})

    monkeypatch.setattr(httpx, "HTTPTransport", lambda: httpx.MockTransport(handle))
    return Balancer(["http://a:1", "http://b:2"], Tally())


def test_a_request_goes_to_the_next_gateway_where_a_connection_is_refused(
    balancer: Balancer,
) -> None:
    assert {tuple(balancer.pick()) for _ in range(4)} == {
        ("http://a:1", "http://b:2"),
        ("http://b:2", "http://a:1"),
    }
    with httpx.Client(base_url="http://b:2", transport=BalancedTransport(balancer)) as client:
        for _ in range(4):
            assert client.get("/").json() == {"host": "a:1"}
    assert balancer.tally.errors == []


def test_a_gateway_that_is_not_ready_gets_no_request_and_without_one_the_connection_fails(
    balancer: Balancer,
) -> None:
    balancer.ready["http://a:1"] = False
    assert balancer.pick() == ["http://b:2"]
    with (
        httpx.Client(base_url="http://b:2", transport=BalancedTransport(balancer)) as client,
        pytest.raises(httpx.ConnectError),
    ):
        client.get("/", headers={"Idempotency-Key": "one"})
    assert [(seen.text, seen.key) for seen in balancer.tally.errors] == [
        ("connection_failed", "one")
    ]


def test_a_503_that_does_not_say_when_to_come_again_is_named_and_unexpected() -> None:
    problem = {"code": "worker_lost"}
    assert describe_error(httpx.Response(503, json=problem)) == (
        "503 worker_lost, without Retry-After"
    )
    said = httpx.Response(503, json=problem, headers={"Retry-After": "1"})
    assert describe_error(said) == "503 worker_lost"
    assert describe_error(httpx.Response(502, text="bad")) == "502 no problem document"
