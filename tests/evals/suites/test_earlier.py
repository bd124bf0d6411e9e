"""Suite earlier: what a new session answers about those before it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.harness import Setup
from evals.suites.earlier import suite as earlier
from evals.suites.earlier.arms import ARMS
from evals.suites.earlier.cases import plant_facts, read_locomo
from evals.suites.earlier.remembered_chunks import RememberedChunks
from evals.suites.earlier.suite import Earlier

MakeSetup = Callable[..., Setup]

LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=4).map(tuple)


@pytest.fixture
def first(make_setup: MakeSetup) -> Earlier:
    """Two short sessions with four facts."""
    return Earlier(make_setup(earlier.CONFIG, "128"), "", 0, sessions=2, tokens=400, questions=4)


@given(LENGTHS, st.integers(1, 30), st.integers(0, 200))
def test_rows_of_others_are_seen_in_one_chunk_in_the_order_of_their_places(
    lengths: tuple[int, ...], size: int, beyond: int
) -> None:
    start = sum(lengths)
    chunks = RememberedChunks(start, size, lengths)
    segments = chunks.find_segments(start + beyond)
    seen = dict[int, int]()
    row = 0
    for length in lengths:
        for place in range(length):
            shift = next(each.shift for each in reversed(segments) if each.start <= row)
            seen[row] = place + shift
            assert seen[row] == place % size
            row += 1
    query = chunks.place(start + beyond)
    assert all(size < query - place + size for place in seen.values())
    assert all(size <= query - place + size - 1 < 4 * size for place in seen.values())
    # Its own tokens of this chunk and of the one before are at their true distances.
    own = chunks.find_start(start + beyond)
    for at in range(max(start, own - size), start + beyond + 1):
        shift = next(each.shift for each in reversed(segments) if each.start <= at)
        assert query - (chunks.place(at) + shift) == start + beyond - at


def test_rows_that_do_not_end_where_the_new_session_begins_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of \(3, 4\) tokens do not end at 8"):
        RememberedChunks(8, 2, (3, 4))


def test_each_fact_is_stated_in_one_session(first: Earlier) -> None:
    case = plant_facts(first.setup, 2, 400, 4)
    assert [said[0]["role"] for said in case.sessions] == ["system", "system"]
    stating = [
        [
            index
            for index, said in enumerate(case.sessions)
            if any(asked.expected in message["content"] for message in said)
        ]
        for asked in case.questions
    ]
    # At even places: as many in each.
    assert stating == [[0], [0], [1], [1]]
    for asked in case.questions:
        assert asked.score(f"It is {asked.expected}") == 1.0
        assert asked.score("I do not know") == 0.0


def test_sessions_of_a_recording_are_those_of_its_file(locomo_file: Path) -> None:
    case = read_locomo([locomo_file], 2)
    assert [said[0]["content"] for said in case.sessions] == 2 * ["A conversation of Ada and Bo."]
    assert [said[1]["content"].split()[:2] for said in case.sessions] == [
        ["(1", "May)"],
        ["(2", "May)"],
    ]
    assert [asked.expected for asked in case.questions] == ["Cherry tomatoes", "church"]
    assert case.questions[0].score("Cherry tomatoes, I think.") > 0.5


def test_several_files_are_one_case_of_all_and_a_folder_has_a_case_a_file(
    first: Earlier, locomo_file: Path
) -> None:
    joined = earlier.suite(first, ["nothing"], [0], 4, [locomo_file, locomo_file])
    assert [unit.paths for unit in joined.units] == [2 * (str(locomo_file),)]
    assert len(read_locomo(2 * [locomo_file], 2).sessions) == 4
    alone = earlier.suite(first, ["nothing"], [0], 4, [locomo_file.parent])
    assert [unit.paths for unit in alone.units] == [(str(locomo_file),)]


def test_what_is_brought_back_is_answered_and_nothing_else(first: Earlier) -> None:
    suite = earlier.suite(first, list(ARMS), [0, 64], 1, [])
    records = [record for unit in suite.units for record in suite.run(unit)]
    rows = {row["method"]: row["mean"] for row in suite.rows(records) if "mean" in row}
    remembered = ("rows", "rows of passages", "one session", "newest text", "passages")
    assert {arm: rows[arm] for arm in remembered} == dict.fromkeys(remembered, 1.0)
    assert rows["nothing"] == 0.0
    assert {"rows, chunks of 64", "one session, chunks of 64", "summaries"} <= set(rows)
    tokens: dict[str, Any] = {each["arm"]: each["prompt_tokens"] for each in records}
    assert tokens["rows"] == tokens["rows of passages"] == tokens["nothing"] < tokens["passages"]
