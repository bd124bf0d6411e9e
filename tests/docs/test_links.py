"""Links and counts in all markdown files of the repository."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import MODULES
from workers.methods import METHODS

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Written into docs/reference/ by the site's build alone.
GENERATED = {"cli.md", "errors.md", "metrics.md", "modules.md", "rest.md", "settings.md"}
NUMBERS = {"sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20}


def markdown_files() -> list[str]:
    """Paths of the markdown files that git knows, third parties' left out."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [path for path in listed if "/vendor/" not in path]


def links(path: str) -> Iterator[tuple[Path, str]]:
    """File and anchor of each link of a page that leads to a file."""
    page = ROOT / path
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if not re.match(r"\w+:", link):
            file, _, anchor = link.partition("#")
            yield (page.parent / file).resolve() if file else page, anchor


def is_generated(path: str, target: Path) -> bool:
    """True for a page of the site's reference, which other pages of the site may link."""
    return (
        path.startswith("docs/")
        and target.parent == ROOT / "docs/reference"
        and target.name in GENERATED
    )


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as the site and GitHub make them, and its own."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    own = re.findall(r'<a id="([^"]+)">', text)
    return {*own, *(re.sub(r"\s", "-", heading) for heading in plain)}


@pytest.mark.parametrize("path", markdown_files())
def test_links_of_a_page_lead_somewhere(path: str) -> None:
    dead = [
        f"{target.name}#{anchor}"
        for target, anchor in links(path)
        if not is_generated(path, target)
        and (not target.exists() or (anchor and anchor not in anchors(target)))
    ]
    assert dead == []


def test_pages_say_how_many_methods_there_are() -> None:
    said = {
        path: NUMBERS[number]
        for path in ("README.md", "docs/concepts.md")
        for number in re.findall(
            rf"(?:one of|lists all) ({'|'.join(NUMBERS)})\b", (ROOT / path).read_text("utf-8")
        )
    }
    assert said == {"README.md": len(METHODS), "docs/concepts.md": len(METHODS)}


def test_the_readme_names_every_method() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Methods")[2].partition("\n## ")[0]
    assert [name for name in METHODS if f"`{name}`" not in section] == []


@pytest.mark.parametrize("path", markdown_files())
def test_benchmarks_that_a_page_names_can_be_run(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    names = re.findall(r"python -m benchmarks ([a-z][\w-]*)", text)
    assert [name for name in names if name not in MODULES] == []
    modules = re.findall(r"python -m\s+(benchmarks\.[\w.]*\w)", text)
    missing = [
        module
        for module in modules
        if not (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
        and not (ROOT / module.replace(".", "/") / "__main__.py").exists()
    ]
    assert missing == []
