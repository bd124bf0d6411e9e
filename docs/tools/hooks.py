"""mkdocs hook: links to files of the repository that are outside docs/ become their paths."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


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
