"""Vendored files: each is the one that was reviewed, with its licence and its place in the list."""

import re

import pytest

from gateway.console.vendor import FILES, FOLDER, LIST, VendoredFile, build_list, hash_file


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_has_the_hash_of_its_origin(file: VendoredFile) -> None:
    assert hash_file(FOLDER / file.name) == file.sha256


def test_there_is_no_file_without_an_origin() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {LIST.name, *(file.name for file in FILES)}


def test_the_list_is_current_and_has_a_licence_of_every_package() -> None:
    assert LIST.read_text(encoding="utf-8") == build_list()
    licences = {file.package for file in FILES if file.path == "LICENSE"}
    assert licences == {file.package for file in FILES}


def test_modules_import_only_what_is_beside_them() -> None:
    imported = [
        name
        for path in FOLDER.glob("*.js")
        for name in re.findall(
            r'^(?:import|export)\b[^;\n]*?from\s*"([^"]+)"', path.read_text(encoding="utf-8"), re.M
        )
    ]
    assert imported == ["./preact.module.js"]
    assert (FOLDER / imported[0]).is_file()
