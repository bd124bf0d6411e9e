"""Events of the service as log lines."""

import logging
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from gateway.observation.identity import digest_tenant, hide_foreign
from gateway.observation.log import describe_turn, log_event
from kvrecall.domain.events import TurnFailed, TurnFinished, TurnRun, TurnStart, TurnTiming
from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome

SESSION = "s_0123456789abcdef01234567"
OUTCOME = TurnOutcome(
    SESSION,
    3,
    Message("assistant", "quartz"),
    "stop",
    prompt_tokens=20,
    output_tokens=5,
    memory=MemoryReport(length=124),
    repairs=(RepairReport("turn", 3, 4, 5, 0.1),),
    seconds={"waiting": 0.5, "queued": 0.25, "prefill": 1.0, "first_token": 0.25, "decode": 9.0},
    durable=False,
    prefilled_tokens=21,
)


def log(event: Any) -> Any:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with capture_logs() as lines:
        log_event(event)
    (line,) = lines
    return line


def test_a_committed_turn_is_one_line_of_numbers_and_ids() -> None:
    run = TurnRun(Sampling(), "snapkv", "w-1", 4)
    event = TurnFinished(OUTCOME, TurnStart(), TurnTiming(11.0, 0.1, first_token=2.0), run)
    assert log(event) == {
        "event": "turn",
        "log_level": "info",
        "session": SESSION,
        "turn": 3,
        "worker": "w-1",
        "finish_reason": "stop",
        "prompt_tokens": 20,
        "output_tokens": 5,
        "remembered_tokens": 99,
        "first_token": 2.0,
        "seconds": dict(OUTCOME.seconds),
        "durable": False,
        "repairs": 1,
        "repairs_skipped": 0,
        "reselections": 0,
        "code": "ok",
    }
    assert "quartz" not in str(describe_turn(event))


@pytest.mark.parametrize(("session", "shown"), [(SESSION, SESSION), ("quartz", "*")])
def test_a_failed_turn_has_its_code_and_only_an_id_of_ours(session: str, shown: str) -> None:
    line = log(TurnFailed(session, "worker_lost"))
    assert (line["event"], line["session"], line["code"]) == ("turn", shown, "worker_lost")
    assert line["finish_reason"] == "error"


def test_a_turn_without_an_answer_has_no_first_token() -> None:
    event = TurnFinished(OUTCOME, TurnStart(), TurnTiming(3.0, 0.1))
    assert log(event)["first_token"] is None


def test_a_tenants_digest_is_what_a_shell_makes_of_its_name() -> None:
    # printf acme | sha256sum | cut -c1-8
    assert digest_tenant("acme") == "822b33ad"


@pytest.mark.parametrize(
    "text", ["", "s_", "s_short", "kvr-0123456789", "s_0123 4567", "S_01234567"]
)
def test_what_is_no_id_of_ours_is_hidden(text: str) -> None:
    assert hide_foreign(text) == "*"
