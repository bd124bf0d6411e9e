"""Selections of a repair, worked out by hand."""

import pytest
import torch

from workers.errors import BadSettings
from workers.methods import RepairKV, build_repair

NO_TIES = torch.zeros(30)


def test_a_strong_anchor_gets_a_wide_burst_and_a_weak_one_a_narrow_one() -> None:
    """0.93 per token behind the anchor: the weak one (0.42) follows eleven of the strong one's."""
    scores = torch.zeros(30)
    scores[5], scores[28] = 1.0, 0.42
    all_tokens = torch.ones(30, dtype=torch.bool)
    chosen = RepairKV(before=0).choose(RepairKV(before=0).utility(scores), all_tokens, NO_TIES, 13)
    assert chosen.tolist() == [*range(5, 17), 28]


def test_scores_decay_faster_in_front_of_an_anchor() -> None:
    scores = torch.zeros(30)
    scores[10] = 1.0
    all_tokens = torch.ones(30, dtype=torch.bool)
    assert RepairKV().choose(RepairKV().utility(scores), all_tokens, NO_TIES, 7).tolist() == [
        9,
        10,
        11,
        12,
        13,
        14,
        15,
    ], "0.8 in front of it is less than 0.93 three times behind it, and 0.8 twice less than five"


def test_an_active_token_promotes_its_evicted_neighbours() -> None:
    scores = torch.zeros(30)
    scores[10], scores[25] = 1.0, 0.1
    evicted = torch.ones(30, dtype=torch.bool)
    evicted[8:13] = False
    assert RepairKV().choose(RepairKV().utility(scores), evicted, NO_TIES, 3).tolist() == [
        13,
        14,
        15,
    ]
    published = RepairKV(select="bursts", before=0, after=1)
    assert published.choose(published.utility(scores), evicted, NO_TIES, 2).tolist() == [25, 26], (
        "only evicted tokens are anchors there"
    )


def test_no_more_tokens_are_chosen_than_there_are() -> None:
    scores = torch.rand(30, generator=torch.Generator().manual_seed(0))
    evicted = torch.zeros(30, dtype=torch.bool)
    assert RepairKV().choose(RepairKV().utility(scores), evicted, NO_TIES, 5).tolist() == []
    evicted[[3, 9]] = True
    for form in (RepairKV(), RepairKV(select="bursts")):
        assert form.choose(form.utility(scores), evicted, NO_TIES, 5).tolist() == [3, 9]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ('{"select": "best"}', "repair_settings: select"),
        ('{"contrast": 9}', "repair_settings: contrast"),
        ('{"contrast": -1}', "repair_settings: contrast"),
        ('{"width": 3}', "repair_settings: width"),
    ],
)
def test_invalid_settings_are_refused_by_name(settings: str, match: str) -> None:
    with pytest.raises(BadSettings, match=match):
        build_repair(settings)


def test_without_settings_the_defaults_are_taken() -> None:
    assert build_repair("") == RepairKV()
