"""Turns through OpenAI's API beside the session API's, at a small size, and their differences."""

import random

import pytest

from benchmarks import openai_turns
from benchmarks.front_door import ECHO
from benchmarks.openai_turns import OPENAI, SESSIONS, build_rows, measure


def test_a_small_run_has_all_rows_of_each_catalog_and_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_turns, "MESSAGES", (2, 6))
    rows = measure(3, random.Random(0))
    assert len(rows) == 2 * 2 * 6
    assert all(row["n"] == 3 for row in rows)
    assert rows[0]["condition"] == "SQLite, 2 messages"


def test_what_openais_api_takes_longer_is_less_what_its_body_takes() -> None:
    turn = {SESSIONS: 5.0, OPENAI: 9.0, f"{ECHO}, {SESSIONS}": 1.0, f"{ECHO}, {OPENAI}": 3.0}
    *_, longer, beyond = build_rows("c", [turn])
    assert (longer["median"], beyond["median"]) == (4.0, 2.0)
