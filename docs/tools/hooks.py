"""mkdocs hooks: pages of the reference are generated, links to files outside of docs/ become paths."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages of the reference."""
    sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "tools")]
    import generate

    for name, build in generate.BUILT.items():
        files.append(File.generated(config, f"reference/{name}", content=build()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace `[text](../path)` by the path where it leads out of docs/, which the site has not."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith("../"):
            return link[0]
        path = f"`{target.removeprefix('../')}`"
        return path if link[1].strip("`") == path.strip("`") else f"{link[1]} ({path})"

    return LINK.sub(replace, markdown)
