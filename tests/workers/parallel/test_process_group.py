"""What ranks say to each other: values, and which step has failed on whom."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.rig.ports import free_port
from tests.workers.parallel.launched import ROOT, WAIT

RANKS = 3
PROGRAM = Path(__file__).with_name("meetings.py")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank found."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"LOCAL_WORLD_SIZE": "1"}
    place |= {"WORLD_SIZE": str(RANKS), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    return [json.loads(each.communicate(timeout=WAIT)[0]) for each in ranks]


def test_a_value_arrives_whole_however_long_it_is(found: list[dict[str, Any]]) -> None:
    """Also where one rank's alone is long."""
    for each in found:
        assert each["values"] == [[0, 1, 2], ["", "", "x" * 5000], 0]


def test_a_step_that_fails_on_one_rank_fails_on_all_and_the_next_one_goes_on(
    found: list[dict[str, Any]],
) -> None:
    """The others learn of it at the exchange that the failed rank did not come to."""
    for rank, each in enumerate(found):
        steps, ends, after = each["one step"]
        failed = "OSError" if rank == RANKS - 1 else "PeerFailed"
        meetings = [[f"{step}{other}" for other in range(RANKS)] for step in "abc"]
        assert steps == [meetings[0], [True], meetings[1], failed, meetings[2], [True]]
        assert ends == ["", "no disk", ""]
        assert after == "goes on"


def test_a_step_that_fails_on_all_fails_with_each_rank_s_own_error(
    found: list[dict[str, Any]],
) -> None:
    """Errors that cannot be sent are no obstacle."""
    assert [each["alike"] for each in found] == [
        ["ValueError", "there"],
        ["Local", "here"],
        ["Local", "here"],
    ]


def test_ranks_at_different_places_end_rather_than_go_on(found: list[dict[str, Any]]) -> None:
    """Whatever they would compute were something else."""
    for each in found:
        assert "out of step" in each["apart"][0]


def test_a_rank_knows_how_many_are_on_its_machine(found: list[dict[str, Any]]) -> None:
    """They divide its memory and its disk."""
    assert [each["local"] for each in found] == [[1]] * RANKS
