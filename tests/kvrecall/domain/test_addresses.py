"""Loopback addresses."""

import pytest

from kvrecall.domain.addresses import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_is_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "localhost.example", "gpu-host"])
def test_any_other_host_may_be_reached_from_elsewhere(host: str) -> None:
    assert not is_loopback(host)
