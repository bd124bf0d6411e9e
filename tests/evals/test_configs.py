"""What may be compared, and how it is written."""

import pytest

from evals.configs import arm_of, arms_of, rows_of
from evals.errors import BadArm, BadBudget
from workers import methods


def test_a_name_alone_is_the_method_in_its_own_way() -> None:
    arm = arm_of("snapkv")
    assert (arm.name, arm.method, arm.build, arm.layer_budgets, arm.settings) == (
        "snapkv",
        "snapkv",
        "none",
        "",
        "{}",
    )


def test_a_method_with_episodes_has_them_in_one_pass_unless_told_otherwise() -> None:
    assert (arm_of("epicache").name, arm_of("epicache").build) == ("epicache+one_pass", "one_pass")
    assert arm_of("epicache+per_episode").build == "per_episode"
    assert not arm_of("epicache+none").has_episodes


def test_budgets_over_layers_and_settings_follow_the_name() -> None:
    arm = arm_of('snapkv@pyramid{"window": 16, "pool": 5}')
    assert (arm.method, arm.layer_budgets, arm.settings) == (
        "snapkv",
        "pyramid",
        '{"window": 16, "pool": 5}',
    )
    assert arm.name == 'snapkv@pyramid{"window": 16, "pool": 5}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("snap-kv", "no arm"),
        ("nothing", "no method 'nothing'"),
        ('snapkv{"windows": 3}', "windows"),
        ("snapkv+one_pass", "'one_pass' is no way to build the episodes of snapkv"),
        ("epicache+twice", "'twice' is no way"),
        ("snapkv@evenly", "uniform, pyramid, sensitivity"),
    ],
)
def test_what_is_off_is_told(text: str, told: str) -> None:
    with pytest.raises(BadArm, match=told):
        arm_of(text)


def test_for_no_name_there_is_every_method_that_evicts_and_both_ways_to_build() -> None:
    names = [arm.name for arm in arms_of(())]
    assert {arm_of(name).method for name in names} == set(methods.METHODS) - {"full"}
    assert {"epicache+one_pass", "epicache+per_episode"} <= set(names)
    assert len(names) == len(set(names))


def test_a_budget_is_a_share_or_a_number_of_rows() -> None:
    assert rows_of("1/8", 1000) == 125
    assert rows_of("256", 1000) == 256


@pytest.mark.parametrize("budget", ["", "2/3", "1/0", "-4", "half", "0", "1/2000"])
def test_what_is_no_budget_is_refused(budget: str) -> None:
    with pytest.raises(BadBudget):
        rows_of(budget, 1000)
