"""Lines of shell that a page of the documentation gives under a name: ```` ```sh NAME ````."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_lines(page: str, name: str) -> str:
    """Return the lines of a page, whose path is relative to docs."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    found = re.search(rf"```sh {name}\n(.*?)```", text, re.DOTALL)
    assert found, f"docs/{page} has no lines {name}"
    return found[1]
