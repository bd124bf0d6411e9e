"""Records that a stopped run reads back."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from evals.errors import BadJournal
from evals.harness import Setup
from evals.journal import Journal, unit_key
from evals.suites.longconv.suite import LongConv


@dataclass(frozen=True)
class Number:
    number: int

    @property
    def label(self) -> str:
        return str(self.number)


def write(path: Path, *numbers: int) -> None:
    with closing(Journal(path)) as journal:
        for number in numbers:
            journal.append(f"key {number}", Number(number), [{"value": number / 3}])


def test_records_are_read_back_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path / "j.jsonl", 1, 2)
    with closing(Journal(tmp_path / "j.jsonl")) as journal:
        assert journal.records("key 1") == [{"value": 1 / 3}]
        assert journal.records("key 2") == [{"value": 2 / 3}]
        assert journal.records("key 3") is None


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_truncated_last_line_does_not_count_and_the_next_is_complete(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    with closing(Journal(path)) as journal:
        assert journal.records("key 1") == [{"value": 1 / 3}]
        assert journal.records("key 2") is None
    write(path, 3)
    with closing(Journal(path)) as journal:
        assert journal.records("key 3") == [{"value": 1.0}]
        assert journal.records("key 2") is None


def test_a_line_that_is_no_unit_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, 1)
    path.write_bytes(b"[1, 2]\n" + path.read_bytes())
    with pytest.raises(BadJournal, match=r"line 1 .*--fresh"):
        Journal(path)


def test_a_units_key_depends_on_all_settings_and_the_suite(
    make_setup: Callable[..., Setup],
) -> None:
    unit = LongConv(make_setup("snapkv"), 512, 4, 4)
    assert unit_key("longconv", unit) == unit_key(
        "longconv", LongConv(make_setup("snapkv"), 512, 4, 4)
    )
    others = [
        replace(unit, tokens=513),
        replace(unit, setup=make_setup("snapkv", seed=12)),
        replace(unit, setup=make_setup("snapkv", budget="1/8")),
        replace(unit, setup=make_setup("snapkv", episodes=3)),
        replace(unit, setup=make_setup('snapkv{"window":16}')),
    ]
    assert (
        len({unit_key("longconv", each) for each in (unit, *others)} | {unit_key("passkey", unit)})
        == 7
    )
