"""Run configurations and budgets, parsed from text."""

import json

import pytest

from evals.configs import budget_rows, parse_config, parse_configs
from evals.errors import BadBudget, BadConfig
from workers import methods


def test_a_name_alone_is_the_method_with_its_defaults() -> None:
    config = parse_config("snapkv")
    assert (config.name, config.method, config.build, config.layer_budgets, config.settings) == (
        "snapkv",
        "snapkv",
        "none",
        "",
        "{}",
    )


def test_a_method_with_episodes_has_them_in_one_pass_unless_another_build_is_named() -> None:
    assert (parse_config("epicache").name, parse_config("epicache").build) == (
        "epicache+one_pass",
        "one_pass",
    )
    assert parse_config("epicache+per_episode").build == "per_episode"
    assert not parse_config("epicache+none").has_episodes


def test_budgets_over_layers_and_settings_follow_the_name() -> None:
    config = parse_config('snapkv@pyramid{"window": 16, "pool": 5}')
    assert (config.method, config.layer_budgets, config.settings) == (
        "snapkv",
        "pyramid",
        '{"window": 16, "pool": 5}',
    )
    assert config.name == 'snapkv@pyramid{"window": 16, "pool": 5}'


def test_utterances_of_a_patched_prompt_follow_the_build() -> None:
    config = parse_config('epicache/8@uniform{"pool": 1}')
    assert (config.build, config.medoids, config.layer_budgets) == ("one_pass", 8, "uniform")
    assert config.name == 'epicache+one_pass/8@uniform{"pool": 1}'
    assert parse_config("epicache+per_episode/32").medoids == 32
    assert parse_config("epicache").medoids == 0


def test_options_of_the_session_follow_the_budgets_over_layers() -> None:
    config = parse_config('snapkv@uniform^stored~0.5{"pool": 5}')
    assert config.name == 'snapkv@uniform^stored~0.5{"pool": 5}'
    assert json.loads(config.options) == {
        "retrieve": {"share": 0.5},
        "prefill": {"attend": "stored"},
    }
    narrowed = parse_config('icecache~{"index": "summaries", "nodes": 64}')
    assert narrowed.name == 'icecache~{"index": "summaries", "nodes": 64}'
    assert narrowed.worker_options == {"retrieve": {"index": "summaries", "nodes": 64}}
    sparse = parse_config("full^.98")
    assert sparse.name == "full^0.98"
    assert sparse.worker_options["prefill"] == {"sparse": "on", "alpha": 0.98}
    assert parse_config("snapkv").options == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkv/8", "without episodes there are no medoids"),
        ("epicache+none/8", "without episodes there are no medoids"),
        ("snap-kv", "no run configuration"),
        ("nothing", "no method 'nothing'"),
        ('snapkv{"windows": 3}', "windows"),
        ("snapkv+one_pass", "'one_pass' is no way to build the episodes of snapkv"),
        ("epicache+twice", "'twice' is no way"),
        ('icecache~{"indexes": 1}', "indexes"),
        ("snapkv@evenly", "uniform, pyramid, sensitivity"),
    ],
)
def test_an_invalid_configuration_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        parse_config(text)


def test_no_names_stand_for_every_method_that_evicts_with_both_ways_to_build() -> None:
    names = [config.name for config in parse_configs(())]
    assert {parse_config(name).method for name in names} == set(methods.METHODS) - {"full"}
    assert {"epicache+one_pass", "epicache+per_episode"} <= set(names)
    assert len(names) == len(set(names))


def test_a_budget_is_a_share_or_a_number_of_rows() -> None:
    assert budget_rows("1/8", 1000) == 125
    assert budget_rows("256", 1000) == 256


@pytest.mark.parametrize("budget", ["", "2/3", "1/0", "-4", "half", "0", "1/2000"])
def test_an_invalid_budget_is_refused(budget: str) -> None:
    with pytest.raises(BadBudget):
        budget_rows(budget, 1000)
