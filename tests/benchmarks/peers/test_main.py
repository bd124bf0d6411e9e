"""A small real run: transformers and kvrecall hold the same session on the reference model."""

from pathlib import Path

import pytest

from benchmarks.peers import benchmark as peers
from benchmarks.peers.agent.journal import PeerRun, store_run
from benchmarks.peers.plan import Plan
from benchmarks.peers.subjects.registry import FULL, KEPT
from reference import MODEL_PATH

PLAN = Plan(str(MODEL_PATH), (), 2, 2, 160, 20, 0.0, 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PeerRun]:
    folder = tmp_path_factory.mktemp("peers")
    setting = peers.open_setting(PLAN, folder / "kvpress", folder)
    found = peers.run_peers(PLAN, setting, [FULL, KEPT, "float16"], folder, again=False)
    return {run.peer: run for run in found}


def test_both_reply_the_same_through_two_restarts(runs: dict[str, PeerRun]) -> None:
    ours, theirs = runs[FULL].turns, runs[KEPT].turns
    assert [turn.text for turn in ours] == [turn.text for turn in theirs]
    assert [turn.tokens for turn in ours] == [turn.tokens for turn in theirs]
    assert all(turn.right for turn in ours)
    assert [turn.started is None for turn in ours] == [True, False, False]


def test_lengths_and_memory_are_those_of_the_servers(runs: dict[str, PeerRun]) -> None:
    for ours, theirs in zip(runs[FULL].turns, runs[KEPT].turns, strict=True):
        assert abs(ours.length - theirs.length) <= 2, "the end of a turn is appended later"
        assert min(ours.peak_bytes, theirs.peak_bytes) > 100 << 20
        assert min(ours.first_token, theirs.first_token) > 0


def test_a_peer_that_cannot_run_says_why(runs: dict[str, PeerRun]) -> None:
    run = runs["llama.cpp, float16"]
    assert run.turns == ()
    assert run.not_run is not None
    assert "GGUF" in run.not_run


def test_a_peer_that_has_run_is_not_run_again(
    runs: dict[str, PeerRun], tmp_path_factory: pytest.TempPathFactory, monkeypatch
) -> None:
    folder = Path(tmp_path_factory.mktemp("again"))
    store_run(folder, PLAN, runs[KEPT])
    monkeypatch.setattr(peers, "run_peer", lambda *_: pytest.fail("it has run"))
    setting = peers.open_setting(PLAN, folder / "kvpress", folder)
    assert peers.run_peers(PLAN, setting, [KEPT], folder, again=False) == [runs[KEPT]]
