"""The log of a worker's registration: a line at the beginning of an outage, few meanwhile, one at the end."""

import pytest
from structlog.testing import capture_logs

from workers.rpc.registration import Outage


@pytest.fixture
def times() -> list[float]:
    """What the clock says: the last number."""
    return [1000.0]


def test_an_outage_is_logged_ever_more_rarely_and_its_end_once(times: list[float]) -> None:
    outage = Outage(lambda: times[-1])
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
    assert (end["event"], end["seconds"]) == ("registry reachable again", 3599)


def test_the_next_outage_is_logged_at_once(times: list[float]) -> None:
    outage = Outage(lambda: times[-1])
    with capture_logs() as lines:
        outage.note("one")
        outage.end()
        outage.note("another")
    assert [line.get("reason") for line in lines] == ["one", None, "another"]


def test_a_registry_that_answers_is_not_mentioned() -> None:
    with capture_logs() as lines:
        Outage().end()
    assert lines == []
