"""What the measurement of forks makes of what it has seen."""

from benchmarks.forks import Held, Plan, answer_rows, byte_rows, message_of, questions_of, turns_of
from reference.conversation import generate

PLAN = Plan(1, 1000, 100, 10, 2, 64, 16, "snapkv", 8)


def test_a_fork_adds_the_tenth_part_of_what_ten_forks_added() -> None:
    alone = Held(1_000, {"ram": 8_000, "nvme": 9_000})
    more = Held(500, {"ram": 0, "nvme": 500})
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
    of_parent, of_separate = answer_rows([True, True], [True, False, True, True], PLAN)
    assert (of_parent["mean"], of_parent["n"], of_parent["tokens"]) == (1.0, 2, 1000)
    assert (of_separate["mean"], of_separate["n"], of_separate["tokens"]) == (0.75, 4, 100)


def test_hardly_two_questions_are_the_same_and_no_turn_leaves_a_call_open() -> None:
    spoken = generate(3, 600, split="held_out")
    asked = questions_of(spoken, 100)
    assert len(set(asked)) > 90
    said = [message_of(message) for turn in turns_of(spoken) for message in turn]
    assert said[0].role == "system"
    assert not any(message.tool_calls for message in said)
