"""Rows of the benchmark of forks, from given measurements."""

from benchmarks.forks import (
    Plan,
    StoredBytes,
    answer_rows,
    byte_rows,
    list_questions,
    split_turns,
    to_message,
)
from reference.conversation import generate

PLAN = Plan(1, 1000, 100, 10, 2, 64, 16, "snapkv", 8)


def test_a_fork_adds_a_tenth_of_the_bytes_of_ten_forks() -> None:
    alone = StoredBytes(1_000, {"ram": 8_000, "nvme": 9_000})
    more = StoredBytes(500, {"ram": 0, "nvme": 500})
    rows = {row["condition"]: row for row in byte_rows(alone, more, PLAN)}
    assert {name: row["median"] for name, row in rows.items()} == {
        "rows and catalog on disk": 100.0,
        "catalog": 50.0,
        "tier ram": 0.0,
        "tier nvme": 50.0,
    }
    assert rows["rows and catalog on disk"]["ratio"] == 0.01
    assert rows["rows and catalog on disk"]["session_bytes"] == 10_000


def test_answers_are_counted_as_shares() -> None:
    with_parent, with_separate = answer_rows([True, True], [True, False, True, True], PLAN)
    assert (with_parent["mean"], with_parent["n"], with_parent["tokens"]) == (1.0, 2, 1000)
    assert (with_separate["mean"], with_separate["n"], with_separate["tokens"]) == (0.75, 4, 100)


def test_questions_are_distinct_and_no_turn_leaves_a_call_open() -> None:
    conversation = generate(3, 600, split="held_out")
    asked = list_questions(conversation, 100)
    assert len(set(asked)) > 90
    messages = [to_message(message) for turn in split_turns(conversation) for message in turn]
    assert messages[0].role == "system"
    assert not any(message.tool_calls for message in messages)
