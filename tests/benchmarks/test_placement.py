"""The simulation of placement: what is known by arithmetic, and the rules of the policies."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.benchmark import BadOptions
from benchmarks.placement.benchmark import Plan, build_workers, describe, measure, play, simulate
from benchmarks.placement.cost import Found
from benchmarks.placement.lru import Blocks
from benchmarks.placement.policies import POLICIES, PRESENT, make_hash_of_prefix
from benchmarks.placement.simulation import Simulation
from benchmarks.placement.traces import FILE, Turn, follow, lengthen, multiply, read_trace, split
from benchmarks.placement.worker import Served, Worker

PLAN = Plan(
    workers=2,
    sessions=40,
    gateways=2,
    slots=2,
    prefill_rate=512.0,
    files_rate=1024.0,
    shared_rate=2048.0,
    step_seconds=0.5,
    ram_blocks=4,
    files_blocks=8,
)


def request(at: float, blocks: list[int], tokens: int, answer: int = 2) -> dict[str, object]:
    return {
        "timestamp": 1000 * at,
        "hash_ids": blocks,
        "input_length": tokens,
        "output_length": answer,
    }


TRACE = [
    request(0, [0, 1, 2], 1500, 100),
    request(3, [0, 3], 900),
    request(30, [0, 1, 4, 5], 1700),
    request(60, [0, 6, 7], 1300),
]


def serve(worker: Worker, turn: Turn) -> Served:
    """Serve a turn to its end."""
    served = worker.serve(turn, turn.at)
    worker.end(turn)
    return served


def test_a_turn_belongs_to_the_session_whose_prompt_it_begins_with() -> None:
    turns = follow(TRACE)
    assert [(turn.session, turn.first) for turn in turns] == [
        (0, True),
        (1, True),
        (0, False),
        (2, True),
    ]
    assert turns[0].written == (0, 1, 4), (
        "1600 tokens with the answer, as the next prompt names them"
    )
    assert turns[1].written == (0,), "blocks that are not whole are not kept"
    assert turns[2].written == (0, 1, 4)


def test_copies_of_a_trace_have_sessions_and_blocks_of_their_own() -> None:
    turns = multiply(follow(TRACE), 7, random.Random(1))
    assert len({turn.session for turn in turns}) == 7
    assert [turn.at for turn in turns] == sorted(turn.at for turn in turns)
    first_blocks = Counter(turn.blocks[0] for turn in turns if turn.first)
    assert sorted(first_blocks.values()) == [1, 3, 3]
    for session in range(7):
        of_session = [turn for turn in turns if turn.session == session]
        assert sum(turn.first for turn in of_session) == 1
    assert split(turns) == turns[len(turns) // 2].at


def test_families_begin_with_blocks_of_their_own() -> None:
    turns = multiply(follow(TRACE), 6, random.Random(1))
    assert lengthen(turns, 0, 2) == turns
    longer = lengthen(turns, 3, 2)
    assert len({turn.blocks[:3] for turn in longer}) == 4, "two copies of two families"
    assert len({block for turn in longer for block in turn.blocks[:3]}) == 12
    for turn, before in zip(longer, turns, strict=True):
        assert turn.blocks[3:] == before.blocks
        assert turn.written[3:] == before.written
        assert turn.input_tokens == before.input_tokens + 3 * 512


def test_a_tier_drops_what_was_used_least_recently_and_the_end_of_a_prompt_first() -> None:
    tier = Blocks(3)
    tier.use([1, 2, 3])
    tier.use([4])
    assert [each in tier for each in (1, 2, 3, 4)] == [True, True, False, True]
    tier.use([1])
    tier.use([5])
    assert [each in tier for each in (1, 2, 4, 5)] == [True, False, True, True]


def test_tokens_are_counted_and_paid_by_where_they_are_found() -> None:
    one, other = build_workers(PLAN)
    turn = Turn(0.0, 0, True, (1, 2), (1, 2), 1024 + 256, 4)
    assert serve(one, turn) == Served("worker-0", 2.5, 4.5, 3.5, Found(0, 0, 0, 1280)), (
        "prefill of 1280 tokens at 512 a second; decoding holds one of two slots"
    )
    again = replace(turn, at=10.0)
    found = Found(1024, 0, 0, 256)
    assert one.count_held(again.blocks) == 2
    assert (serve(one, again).found, serve(one, replace(again, at=20.0)).wait) == (found, 0.5)
    assert other.count_held(again.blocks) == 0
    shared = other.serve(replace(again, at=20.0), 20.0)
    assert (shared.found, shared.wait) == (Found(0, 0, 1024, 256), 0.5 + 0.5)
    one.ram.use([5, 6, 7, 8])
    files = one.serve(replace(again, at=40.0), 40.0)
    assert (files.found, files.wait) == (Found(0, 1024, 0, 256), 0.5 + 1.0)


def test_of_a_prompt_that_is_found_whole_the_last_block_is_computed() -> None:
    worker = build_workers(PLAN)[0]
    turn = Turn(0.0, 0, True, (1, 2), (1, 2), 1024, 4)
    serve(worker, turn)
    assert worker.serve(replace(turn, at=10.0), 10.0).found == Found(512, 0, 0, 512)


def test_turns_wait_for_the_model_and_for_a_slot() -> None:
    worker = build_workers(PLAN)[0]
    turns = [Turn(0.0, n, True, (n,), (n,), 512, 10) for n in (1, 2, 3)]
    served = [worker.serve(turn, 0.0) for turn in turns]
    assert [each.wait for each in served] == [1.0, 2.0, 7.0], "the third begins when the first ends"


def test_a_turn_waits_for_the_end_of_its_sessions_last_one() -> None:
    workers = build_workers(PLAN)
    policy = make_hash_of_prefix(workers, random.Random(1), 1)
    turns = [Turn(at, 0, at == 0.0, (1,), (1,), 600, 2) for at in (0.0, 1.0)]
    first, second = [served for _, served in Simulation(policy, workers).run(turns)]
    assert first.end == 600 / 512 + 1.0
    assert second.end == first.end + 88 / 512 + 1.0
    assert second.wait == pytest.approx(88 / 512), "counted from when it could be sent"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_plays_all_turns_and_follows_from_the_seed(name: str) -> None:
    turns = multiply(follow(TRACE), PLAN.sessions, random.Random(1))
    rows = list(play(name, turns, PLAN, "all"))
    assert rows == list(play(name, turns, PLAN, "all"))
    assert sum(row["n"] for row in rows) == len(turns)
    tokens = sum(turn.input_tokens for turn in turns)
    found = sum(
        row["computed_tokens"] / (1 - row["ram_share"] - row["files_share"] - row["shared_share"])
        for row in rows
    )
    assert found == pytest.approx(tokens, rel=0.01)
    assert all(row["imbalance"] >= 1.0 for row in rows)


def test_sessions_stay_where_they_are_unless_the_policy_moves_them() -> None:
    turns = multiply(follow(TRACE), PLAN.sessions, random.Random(1))
    moves = {name: sum(row["moves"] for row in play(name, turns, PLAN, "all")) for name in POLICIES}
    assert moves["round robin"] > 0
    assert moves["hash of the session"] == moves[PRESENT] == moves["longest prefix in RAM"] == 0


def test_a_trace_is_read_and_measured(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("\n".join(json.dumps(each) for each in TRACE))
    assert read_trace(tmp_path) == follow(TRACE)
    plan = replace(PLAN, traces=str(tmp_path), pace=2.0)
    rows = list(measure(plan).rows)
    assert len(rows) == 2 * 2 * len(POLICIES)
    assert rows[0]["condition"] == "0 blocks, tuning: round robin"
    assert describe(rows[0]).startswith("0 blocks, tuning: round robin")
    with pytest.raises(BadOptions, match="--traces needs a folder"):
        measure(Plan())
    assert list(simulate([], replace(plan, policies=()))) == []
