"""The file of native code that is opened: the best one for the CPU, of those that can be."""

import shutil
from pathlib import Path

import pytest

from workers.native.gather import Gather
from workers.native.library import LEVELS, find_files, open_library


def test_the_best_file_that_the_cpu_runs_is_opened(native_folder: Path) -> None:
    assert open_library("a capability of another CPU", native_folder)[0] == "baseline"
    assert open_library("DEFAULT", native_folder)[0] == "baseline"


def test_a_file_of_a_lower_level_is_opened_where_there_is_no_better_one(
    native_folder: Path, tmp_path: Path
) -> None:
    shutil.copy(find_files(native_folder)["baseline"], tmp_path)
    assert open_library("AVX512", tmp_path)[0] == "baseline"


def test_without_files_or_with_those_of_another_system_there_is_no_library(
    native_folder: Path, tmp_path: Path
) -> None:
    assert open_library("AVX2", tmp_path) == (None, None)
    name = find_files(native_folder)["baseline"].name
    for level in LEVELS:
        (tmp_path / name.replace("baseline", level)).write_bytes(b"of another system")
    assert len(find_files(tmp_path)) == 3
    assert open_library("AVX2", tmp_path) == (None, None)


def test_a_file_that_was_built_from_other_sources_is_not_opened(
    native_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments are others: a call would read memory that is not its own."""
    shutil.copy(find_files(native_folder)["baseline"], tmp_path)
    monkeypatch.setattr("workers.native.library.Call", Gather)
    assert open_library("AVX512", tmp_path) == (None, None)
