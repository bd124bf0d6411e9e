"""The measures of the source tree, on small trees written by hand and on this one."""

from pathlib import Path

import pytest

from benchmarks import house
from kvrecall.reporting.results import read_results

TREE = {
    "kvrecall/domain/session.py": '"""Session values."""\n\nclass SessionSettings:\n    repair_seconds: float\n',
    "kvrecall/cli/__init__.py": '"""Commands."""\n',
    "services/turns.py": '''"""Turns."""

from kvrecall.cli.commands import app


class TurnRunner:
    """Whoever runs turns."""

    async def run(self):
        async for item in self._attempt():
            yield item

    async def _attempt(self):
        told = 1
        yield told
''',
    "services/cluster/pool.py": "import services.turns\nimport kvstore.store\n",
    "kvstore/store.py": "def rows_of(page):\n    return page\n",
    "workers/engine/engine.py": "from workers.generation import decode\n",
    "workers/generation/decode.py": "from workers.engine import engine\n",
    "proto/kvrecall/v1/worker.proto": "message SessionSpec {\n  double repair_seconds = 1;\n}\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout with one fault of each kind."""
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def measures(tree: Path) -> dict[str, house.Measure]:
    return {each.metric: each for each in house.measure(tree)}


def test_an_import_of_a_higher_floor_and_one_over_the_wire_are_arrows_up(
    measures: dict[str, house.Measure],
) -> None:
    assert measures["arrows up"].value == 2
    assert measures["arrows up"].detail == (
        "services.cluster.pool > kvstore.store; services.turns > kvrecall.cli"
    )


def test_rooms_that_import_each_other_are_a_circle(measures: dict[str, house.Measure]) -> None:
    assert measures["rooms in circles"].value == 2
    assert measures["rooms in circles"].detail == "workers.engine - workers.generation"


def test_types_of_a_value_count_in_python_and_in_proto(measures: dict[str, house.Measure]) -> None:
    assert measures["types per session settings"].value == 2
    assert measures["types per sampling"].value == 0
    assert measures["source files of the option repair_seconds"].value == 2


def test_a_turns_hops_are_its_longest_chain_of_generators(
    measures: dict[str, house.Measure],
) -> None:
    assert measures["nested async generators in the service's turn"].value == 2


def test_words_and_wh_clauses_are_counted(measures: dict[str, house.Measure]) -> None:
    assert measures["docstrings"].value == 4
    assert measures["docstrings that are wh-clauses"].value == 25
    assert measures["identifiers with an overloaded word"].detail == "told 1"
    assert measures["lines of prose with an overloaded word"].detail == "whoever 1"
    assert measures["functions named X_of"].value == 1


def test_a_label_that_is_measured_again_replaces_its_rows(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "house.json"
    for label in ("0.1.0", "0.2.0", "0.2.0"):
        arguments = ["house.py", "--root", str(tree), "--label", label, "--out", str(out)]
        monkeypatch.setattr("sys.argv", arguments)
        house.main()
    rows = read_results(out).results
    assert [row["condition"] for row in rows] == sorted(row["condition"] for row in rows)
    assert len(rows) == 2 * len(house.measure(tree))
    assert "| arrows up | 2 | 2 |" in capsys.readouterr().out


def test_this_tree_has_no_room_over_twenty_modules() -> None:
    measured = {each.metric: each for each in house.measure(house.HERE)}
    assert measured["modules in the biggest folder"].value <= 20
