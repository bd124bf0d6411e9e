"""The documentation: generated pages are current, the site builds, README and changelog hold."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from kvrecall.domain.codes import ErrorCode
from kvrecall_server.app.settings import Settings

ROOT = Path(__file__).parents[2]
# Pages that the site's build generates, each with entries that it must have.
GENERATED = {
    "cli": ["kvrecall serve", "kvrecall report", "kvrecall eval longconv"],
    "errors": [code.value for code in ErrorCode],
    "metrics": ["kvrecall_turn_seconds", "kvrecall_worker_up"],
    "modules": ["forward_step.py"],
    "rest": list(json.loads((ROOT / "docs/reference/openapi.json").read_text("utf-8"))["paths"]),
    "settings": [f"KVRECALL_{name.upper()}" for name in Settings.model_fields],
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this interpreter in the project's root."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_the_committed_pages_are_current() -> None:
    checked = run("docs/tools/generate.py", "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_page_that_is_not_current_is_named(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; sys.path[:0] = ['docs/tools', '.']; sys.argv = ['x', '--check'];"
        f"import generate; generate.REFERENCE = pathlib.Path({str(tmp_path)!r}); sys.exit(generate.main())"
    )
    checked = run("-c", code)
    assert checked.returncode == 1
    assert "docs/reference/openapi.json is not current: run make docs" in checked.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = run("-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path))
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "reference" / "client" / "index.html").exists()
    assert "KvrecallClient" in (tmp_path / "reference/client/index.html").read_text("utf-8")
    for name, entries in GENERATED.items():
        page = (tmp_path / "reference" / name / "index.html").read_text("utf-8")
        assert [entry for entry in entries if html.escape(entry) not in page] == []


def test_the_numbers_of_the_readme_are_those_of_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    benchmarks = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    measured = readme[readme.index("## Measured") :]
    rows = [line for line in measured.splitlines() if re.match(r"\| \w.*\d", line)]
    assert rows
    assert all(row in benchmarks for row in rows)


def test_the_changelog_has_the_newest_version_first() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}$", changelog, re.M)
    assert len(versions) > 1
    assert versions == sorted(versions, reverse=True)


def test_every_decision_is_in_the_index_and_names_code_that_exists() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "index.md").read_text(encoding="utf-8")
    pages = sorted(folder.glob("0*.md"))
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert page.name in index
        for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text[text.index("## In the code") :]):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
