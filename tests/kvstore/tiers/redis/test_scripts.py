"""Every Lua script is package data that begins with its documentation."""

from importlib.resources import files

import pytest

from kvstore.tiers.redis import scripts

NAMES = sorted(
    path.name.removesuffix(".lua")
    for path in files(scripts).iterdir()
    if path.name.endswith(".lua") and path.name != "session_index.lua"
)


def test_every_script_is_loaded() -> None:
    assert sorted(name.lower() for name in vars(scripts) if name.isupper()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_script_documents_its_keys_arguments_and_reply(name: str) -> None:
    text: str = files(scripts).joinpath(f"{name}.lua").read_text(encoding="utf-8")
    head = [line for line in text.splitlines() if line.startswith("--")]
    assert text.startswith("-- ")
    assert any(line.startswith("-- KEYS[1]") for line in head)
    assert any(line.startswith("-- Reply") for line in head)
    assert ("ARGV[1]" in text) == any(line.startswith("-- ARGV[1]") for line in head)
