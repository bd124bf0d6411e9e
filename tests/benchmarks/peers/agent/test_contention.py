"""Waits for a CPU, from two readings."""

import os

from benchmarks.peers.agent.contention import longest_wait, parse_wait, read_waits


def test_the_wait_is_the_second_number_in_nanoseconds() -> None:
    assert parse_wait("9000000000 1500000000 12\n") == 1.5


def test_the_longest_wait_between_two_readings_is_that_of_one_thread() -> None:
    before = {1: 5.0, 2: 1.0}
    assert longest_wait(before, {1: 5.5, 2: 1.75, 3: 0.25}) == 0.75
    assert longest_wait({}, {}) == 0.0


def test_every_thread_of_a_process_is_read() -> None:
    waits = read_waits(os.getpid())
    assert os.getpid() in waits
    assert all(wait >= 0 for wait in waits.values())
