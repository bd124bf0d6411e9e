"""A real server, two tenants: short questions are answered before any of a flood that came first."""

import asyncio
from pathlib import Path

import httpx

from benchmarks.fair_shares.benchmark import BENCHMARK, ask, compare, served, wait_until_idle
from benchmarks.fair_shares.flood import TENANT, send


def test_a_small_run_has_a_row_of_each_window(tmp_path: Path) -> None:
    with served(tmp_path) as url:
        rows = compare(url, [3], rounds=1, questions=2)
    assert [(row["condition"], row["n"]) for row in rows] == [
        ("quiet", 2),
        ("3 clients of another tenant", 2),
        ("killed clients", 1),
    ]
    assert rows[1]["ratio_to"] == "quiet"
    assert "x quiet" in BENCHMARK.describe(rows[1])


async def test_questions_are_answered_before_a_flood_that_came_first(tmp_path: Path) -> None:
    """What has no place is refused at once."""
    with served(tmp_path) as url, httpx.Client(base_url=url, timeout=600) as one:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url, timeout=600, limits=limits, headers=TENANT
        ) as http:
            flood = [asyncio.create_task(send(http, client, 0)) for client in range(70)]
            first_done = asyncio.as_completed(flood)
            for _ in range(10):  # 12 run, 48 wait, 10 are refused
                assert not await next(first_done)
            for number in range(3):
                await asyncio.to_thread(ask, one, number)
            answered = sum(task.done() and task.result() for task in flood)
            assert answered <= 4, "no more than ran when the first question came"
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
        await asyncio.to_thread(wait_until_idle, one)
