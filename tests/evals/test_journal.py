"""What a run that was stopped finds again."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from evals.errors import BadJournal
from evals.harness import Setup
from evals.journal import Journal, key_of
from evals.suites.longconv.suite import LongConv


@dataclass(frozen=True)
class Number:
    number: int

    @property
    def label(self) -> str:
        return str(self.number)


def noted(path: Path, *numbers: int) -> None:
    with closing(Journal(path)) as journal:
        for number in numbers:
            journal.note(f"key {number}", Number(number), [{"value": number / 3}])


def test_what_was_noted_is_found_again_to_the_last_bit(tmp_path: Path) -> None:
    noted(tmp_path / "j.jsonl", 1, 2)
    with closing(Journal(tmp_path / "j.jsonl")) as journal:
        assert journal.records("key 1") == [{"value": 1 / 3}]
        assert journal.records("key 2") == [{"value": 2 / 3}]
        assert journal.records("key 3") is None


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line_does_not_count_and_the_next_is_whole(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "j.jsonl"
    noted(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    with closing(Journal(path)) as journal:
        assert journal.records("key 1") == [{"value": 1 / 3}]
        assert journal.records("key 2") is None
    noted(path, 3)
    with closing(Journal(path)) as journal:
        assert journal.records("key 3") == [{"value": 1.0}]
        assert journal.records("key 2") is None


def test_a_line_of_something_else_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    noted(path, 1)
    path.write_bytes(b"[1, 2]\n" + path.read_bytes())
    with pytest.raises(BadJournal, match=r"line 1 .*--fresh"):
        Journal(path)


def test_a_unit_is_the_same_only_with_the_same_settings_in_the_same_suite(
    setup_of: Callable[..., Setup],
) -> None:
    unit = LongConv(setup_of("snapkv"), 512, 4, 4)
    assert key_of("longconv", unit) == key_of("longconv", LongConv(setup_of("snapkv"), 512, 4, 4))
    others = [
        replace(unit, tokens=513),
        replace(unit, setup=setup_of("snapkv", seed=12)),
        replace(unit, setup=setup_of("snapkv", budget="1/8")),
        replace(unit, setup=setup_of("snapkv", episodes=3)),
        replace(unit, setup=setup_of('snapkv{"window":16}')),
    ]
    assert (
        len({key_of("longconv", each) for each in (unit, *others)} | {key_of("passkey", unit)}) == 7
    )
