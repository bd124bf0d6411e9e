"""The log of an outage: a line at its beginning, at most one a minute meanwhile, one at its end."""

from itertools import pairwise

import pytest
import structlog
from structlog.testing import capture_logs

from kvrecall.telemetry.outage import Outage

EVENTS = (structlog.get_logger(), "registry unreachable", "registry reachable again")


@pytest.fixture
def times() -> list[float]:
    """What the clock says: the last number."""
    return [1000.0]


def test_an_outage_is_logged_ever_more_rarely_and_its_end_once(times: list[float]) -> None:
    outage = Outage(*EVENTS, lambda: times[-1])
    with capture_logs() as lines:
        for second in range(3600):
            times.append(1000.0 + second)
            outage.note("it does not answer")
        outage.end()
        outage.end()
    *failures, end = lines
    assert failures[0] == {
        "event": "registry unreachable",
        "log_level": "warning",
        "reason": "it does not answer",
        "seconds": 0,
    }
    assert 3 < len(failures) < 15
    seconds = [each["seconds"] for each in failures]
    assert all(later - earlier >= 60 for earlier, later in pairwise(seconds))
    assert (end["event"], end["seconds"]) == ("registry reachable again", 3599)


def test_the_next_outage_is_logged_at_once(times: list[float]) -> None:
    outage = Outage(*EVENTS, lambda: times[-1])
    with capture_logs() as lines:
        outage.note("one")
        outage.end()
        outage.note("another")
    assert [line.get("reason") for line in lines] == ["one", None, "another"]


def test_a_registry_that_answers_is_not_mentioned() -> None:
    with capture_logs() as lines:
        Outage(*EVENTS).end()
    assert lines == []
