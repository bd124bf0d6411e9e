"""Bytes of the catalog are divided between what it holds, and `kvrecall size` says what it takes."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.scale.backends import sqlite
from benchmarks.scale.catalog_bytes import Held, Plan, divide, hold
from kvrecall_server.app.start.catalog_size import (
    IN_FILE,
    get_catalog_bytes,
    get_worker_state_bytes,
)
from reference import MODEL_PATH
from workers.engine.settings import WorkerSettings
from workers.model.sizes import read_sizes


def test_bytes_are_divided_between_sessions_turns_and_tokens() -> None:
    def hold_some(sessions: int, turns: int, tokens: int) -> Held:
        rest = 7_000 + 3_000 * sessions + 1_500 * turns + 8 * tokens
        return Held(rest + 99 + 5, states=99, kept=5, turns=turns, tokens=tokens)

    steps = [hold_some(0, 0, 0), hold_some(2, 2, 90), hold_some(2, 12, 700), hold_some(2, 14, 5000)]
    assert divide(*steps) == pytest.approx((3_000, 1_500, 8))


def test_a_catalog_takes_what_size_says(tmp_path: Path) -> None:
    plan = Plan(sessions=2, turns=6, long_lines=60, budget=256, model="reference")
    with sqlite(tmp_path / "sqlite") as backend:
        empty, *_, last = asyncio.run(hold(backend, plan))
    model = read_sizes(MODEL_PATH)
    tokens, turns = last.tokens // plan.sessions, last.turns // plan.sessions
    settings = WorkerSettings(max_budget=plan.budget)
    state = get_worker_state_bytes(
        model.shape.n_layers, model.shape.n_kv_heads, tokens, turns, settings
    )
    assert last.states / plan.sessions == pytest.approx(state, rel=0.15)
    expected = get_catalog_bytes(IN_FILE, state, turns, tokens, kept=16)
    assert (last.total - empty.total) / plan.sessions == pytest.approx(expected, rel=0.3)
