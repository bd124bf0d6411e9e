"""Code that does not end is ended in its own thread, and no other."""

import threading

import pytest

from kvrecall.sandbox.deadline import DeadlinePassed, limit_seconds


def spin() -> None:
    while True:
        pass


def test_a_loop_without_end_is_ended() -> None:
    with pytest.raises(DeadlinePassed), limit_seconds(0.05):
        spin()


def test_what_ends_in_time_is_left_alone() -> None:
    with limit_seconds(60.0):
        done = sum(range(1000))
    assert done == 499500
    timers = [
        each
        for each in threading.enumerate()
        if isinstance(each, threading.Timer) and each.interval == 60.0
    ]
    for each in timers:
        each.join(10.0)  # one that is cancelled ends at once, one that is not in a minute
    assert not [each for each in timers if each.is_alive()]


def test_other_threads_go_on() -> None:
    gate = threading.Event()
    other = threading.Thread(target=gate.wait)
    other.start()
    with pytest.raises(DeadlinePassed), limit_seconds(0.05):
        spin()
    assert other.is_alive()
    gate.set()
    other.join()
