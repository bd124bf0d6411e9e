"""What is metered is what the workers computed, to the token, however requests end."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.metering.mixture import measure
from tests.end_to_end.servers import Cluster, Server

REQUESTS = 60


@pytest.fixture(params=["one process", "two workers on Redis"])
def metered(
    request: pytest.FixtureRequest,
    new_server: Callable[..., Server],
    new_cluster: Callable[..., Cluster],
) -> Server | Cluster:
    """Servers of this test's own: nothing else computes there."""
    made: Any = (new_server if request.param == "one process" else new_cluster)()
    made.start()
    return made


def test_metered_tokens_are_computed_tokens_also_of_requests_that_end_early(
    metered: Server | Cluster,
) -> None:
    tokens, ends = asyncio.run(measure(metered.url, REQUESTS, 1, metered.operations))
    assert ends.total() == REQUESTS
    assert ends["cut"] + ends["left"] >= 5, ends
    assert ends["answered"] >= REQUESTS // 3, ends
    assert tokens.computed > 5_000
    assert tokens.metered == tokens.computed
