"""Every place that names kvrecall's version names that of pyproject.toml."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^## (?:Unreleased \((\S+)\)|(\S+) - (\S+))$", re.MULTILINE)


def read_project(folder: str) -> dict[str, Any]:
    text = (ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


VERSION: str = read_project(".")["version"]


def test_the_client_has_the_server_s_version_and_the_server_needs_it() -> None:
    assert read_project("kvrecall")["version"] == VERSION
    assert read_project(".")["dependencies"] == [f"kvrecall=={VERSION}"]


def test_the_changelog_begins_with_the_version() -> None:
    prepared, released, _ = HEADING.findall((ROOT / "CHANGELOG.md").read_text("utf-8"))[0]
    assert (prepared or released) == VERSION


def test_the_citation_names_the_newest_release_and_its_day() -> None:
    headings = HEADING.findall((ROOT / "CHANGELOG.md").read_text("utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    released = next((version, day) for _, version, day in headings if version)
    assert (citation["version"], citation["date-released"]) == released


@pytest.mark.parametrize(
    ("file", "images"), [("docker-compose.yml", 2), ("docker-compose.gpu.yml", 1)]
)
def test_composes_images_have_the_version_as_their_tag(file: str, images: int) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.findall(r"image: kvrecall-[\w-]+:(\S+)", text) == [VERSION] * images


def test_the_chart_and_the_api_s_description_have_the_version() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "kvrecall" / "Chart.yaml").read_text("utf-8"))
    assert chart["appVersion"] == VERSION
    described = (ROOT / "docs" / "reference" / "openapi.json").read_text(encoding="utf-8")
    assert f'"version": "{VERSION}"' in described[:400]
