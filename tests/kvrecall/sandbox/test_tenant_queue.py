"""Tenants take turns, with one job of each at a time."""

import pytest

from kvrecall.sandbox.tenant_queue import QueueFull, TenantQueue


def test_tenants_take_turns() -> None:
    queue: TenantQueue[int] = TenantQueue(4)
    for job in range(3):
        queue.put("mallory", job)
    queue.put("ann", 10)
    taken = []
    for _ in range(4):
        tenant, job = queue.take() or ("", 0)
        taken.append(job)
        queue.finish(tenant)
    assert taken == [0, 10, 1, 2]


def test_one_job_of_a_tenant_runs_at_a_time() -> None:
    queue: TenantQueue[int] = TenantQueue(4)
    for job in range(2):
        queue.put("mallory", job)
    assert queue.take() == ("mallory", 0)
    queue.put("ann", 10)
    assert queue.take() == ("ann", 10)
    queue.finish("mallory")
    assert queue.take() == ("mallory", 1)


def test_a_tenant_has_its_own_room() -> None:
    queue: TenantQueue[int] = TenantQueue(1)
    queue.put("mallory", 0)
    with pytest.raises(QueueFull):
        queue.put("mallory", 1)
    queue.put("ann", 0)


def test_a_closed_queue_gives_and_takes_nothing() -> None:
    queue: TenantQueue[int] = TenantQueue(1)
    queue.put("ann", 0)
    assert list(queue.close()) == [0]
    assert queue.take() is None
    with pytest.raises(QueueFull):
        queue.put("ann", 1)


def test_so_many_jobs_of_a_tenant_run_at_a_time_as_may() -> None:
    queue: TenantQueue[int] = TenantQueue(4, at_once=2)
    for job in range(3):
        queue.put("mallory", job)
    queue.put("ann", 10)
    assert [queue.take() for _ in range(3)] == [("mallory", 0), ("ann", 10), ("mallory", 1)]
    queue.put("ann", 11)
    assert queue.take() == ("ann", 11), "two of mallory's run"
