"""The benchmarks of retrieval run at small sizes, with every arm and its ratio."""

import argparse

from benchmarks.retrieval import answers, prompts, step


def test_a_step_is_timed_with_its_parts() -> None:
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    given = parser.parse_args(["--rounds", "2", "--budget", "64"])
    given.seed = 0
    rows = list(step.measure(1000, given))
    metrics = {row["metric"]: row for row in rows}
    for index in step.INDEXES:
        assert {index, f"{index}: search", f"{index}: reading", f"{index}: attention"} <= set(
            metrics
        )
        assert metrics[f"full attention / {index}"]["n"] == 2
    assert all(row["median"] > 0 for row in rows)


def test_answers_are_timed_by_method() -> None:
    parser = argparse.ArgumentParser()
    answers.add_arguments(parser)
    given = parser.parse_args(["--rounds", "1", "--budget", "64"])
    given.seed = 0
    rows = list(answers.measure(300, given))
    for unit in ("second", "CPU second"):
        of_unit = [row for row in rows if row["unit"] == f"tokens per {unit}"]
        assert len(of_unit) == len(answers.ARMS)
        assert [row["ratio_to"] for row in of_unit if "ratio" in row] == [answers.BASELINE] * 3
    share, first = rows[-2:]
    assert 0 < share["median"] < 1
    assert first["median"] > 0


def test_prompts_are_timed_by_what_they_attend_to() -> None:
    parser = argparse.ArgumentParser()
    prompts.add_arguments(parser)
    given = parser.parse_args(["--rounds", "1", "--budget", "64"])
    given.seed = 0
    rows = list(prompts.measure(600, given))
    of_unit = [row for row in rows if row["unit"] == "tokens per CPU second"]
    assert len(of_unit) == len(prompts.ARMS)
    assert all(row["median"] > 0 for row in of_unit)
