"""The SQL and Lua files of the catalogs: complete, documented, and with named columns."""

import re
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

import pytest

import services.catalog
from services.catalog.redis import scripts
from services.catalog.sqlite.storage.schema import load_schema

CATALOG = Path(services.catalog.__file__).parent
LUA_FILES = sorted(path.name for path in (CATALOG / "redis" / "scripts").glob("*.lua"))
# Code that other scripts are prefixed with.
SHARED = {"commit_log.lua", "page_tree.lua"}


def is_comment(line: str) -> bool:
    return line.startswith("--")


@pytest.mark.parametrize("name", LUA_FILES)
def test_each_script_is_loaded_and_its_header_names_keys_arguments_and_reply(name: str) -> None:
    text = files("services.catalog.redis.scripts").joinpath(name).read_text()
    loaded = [value for value in vars(scripts).values() if isinstance(value, str)]
    assert any(text in value for value in loaded)
    header = "".join(takewhile(is_comment, text.splitlines(keepends=True)))
    assert "KEYS" in header
    if name not in SHARED:
        assert "Reply:" in header
        assert ("ARGV" in header) == ("ARGV" in text)


def test_the_schema_creates_strict_tables_only() -> None:
    tables = [statement for statement in load_schema() if "CREATE TABLE" in statement]
    assert len(tables) == 23
    assert all("STRICT" in statement for statement in tables)


def test_each_insert_names_its_columns() -> None:
    for path in (CATALOG / "sqlite").rglob("*.py"):
        for statement in re.findall(r"(?:INSERT|REPLACE) INTO [^\"]*", path.read_text()):
            assert re.match(r"(?:INSERT|REPLACE) INTO [\w{}]+ \(", statement), (path, statement)
