"""CONTRIBUTING.md: its paths exist, and its list of a session option's files is the true one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SOURCES = ("gateway", "services", "workers", "kvstore", "kvrecall", "proto")
# Files that name the option without being touched when one is added: generated stubs, and other
# values of the same name (the deadline of a worker call, a total of replays).
NOT_THE_OPTION = re.compile(
    r"_pb2|^services/cluster/|^kvrecall_server/replay/|^kvrecall_server/demo/|^kvrecall/protocol/calls|^gateway/metrics/"
)


def section(title: str) -> str:
    """The text under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    assert found is not None, f"CONTRIBUTING.md has no section {title!r}"
    return found[1]


def paths_in(text: str) -> list[str]:
    """Paths of the tree in backticks."""
    return re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text)


def option_and_files() -> tuple[str, list[str]]:
    """The option that the page takes as its example, and the files it lists."""
    text = section("Adding a session option")
    option = re.search(r"For `(\w+)`", text)
    assert option is not None
    return option[1], re.findall(r"^\d+\. `([^`]+)`", text, re.M)


def files_that_name(option: str) -> set[str]:
    """Sources and hand-written pages that name an option."""
    paths = [
        *(path for room in SOURCES for path in (ROOT / room).rglob("*") if path.is_file()),
        *(ROOT / "docs").rglob("*.md"),
    ]
    named = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix in {".py", ".proto", ".lua", ".sql", ".md"}
        and re.search(rf"\b{option}\b", path.read_text(encoding="utf-8"))
    }
    return {
        path
        for path in named
        if not NOT_THE_OPTION.search(path) and not path.startswith("docs/reference/")
    }


def test_a_newcomers_questions_are_answered_by_paths_that_exist() -> None:
    rows = [line for line in section("Where is it?").splitlines() if "?" in line]
    assert rows
    for row in rows:
        paths = paths_in(row)
        assert paths, row
        assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("title", ["Layout", "Imports", "How to add"])
def test_the_other_paths_of_the_page_exist(title: str) -> None:
    missing = [path for path in paths_in(section(title)) if not (ROOT / path).exists()]
    assert missing == []


def test_a_session_option_is_listed_with_all_its_files() -> None:
    option, listed = option_and_files()
    tests = {path for path in listed if path.startswith("tests/")}
    assert len(listed) == len(set(listed))
    assert set(listed) - tests == files_that_name(option)
    assert len(tests) == 2
    for path in tests:
        assert option in (ROOT / path).read_text(encoding="utf-8")
