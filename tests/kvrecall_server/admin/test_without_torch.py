"""Commands on the data of a stopped service with pages: they load no model, and import no torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import sys
from kvrecall_server.cli.__main__ import main
sys.argv = ["kvrecall", *sys.argv[1:]]
try:
    main()
finally:
    print("imported:", *({"torch", "transformers"} & sys.modules.keys()), file=sys.stderr)
"""


def run(*arguments: str | Path) -> list[str]:
    """The lines on standard error of a command that ends well."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr.splitlines()


def test_neither_a_check_nor_an_archive_needs_the_model(served: Any, tmp_path: Path) -> None:
    file = tmp_path / "s.kvs"
    for arguments in (
        ("fsck", "--data", served.data),
        ("export", served.parent, file, "--data", served.data),
        ("import", file, "--as", "again", "--data", served.data),
        ("fsck", "--repair", "--data", served.data),
        ("keys", "list", "--data", served.data),
    ):
        lines = run(*arguments)
        assert lines[-1] == "imported:", arguments


def test_the_first_line_says_what_is_being_done(served: Any, tmp_path: Path) -> None:
    checked = run("fsck", "--data", served.data)
    exported = run("export", served.parent, tmp_path / "s.kvs", "--data", served.data)
    assert f"checking {served.data}" in checked[0]
    assert f"exporting {served.parent}" in exported[0]
