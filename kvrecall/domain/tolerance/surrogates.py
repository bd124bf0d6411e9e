r"""Lone surrogates, halves of an emoji that some client has cut: no text in UTF-8 has them.

They come as characters of a text, or as escapes in a JSON text, `\ud83d`.
"""

import re

REPLACEMENT = "\ufffd"
_LONE = re.compile("[\ud800-\udfff]")
# Every escape of a JSON text from left to right, so that `\\ud83d` is a backslash and letters.
_ESCAPE = re.compile(
    r"\\(?:(?P<pair>u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def replace_in_text(text: str) -> str:
    """Replace lone surrogates by U+FFFD."""
    return text if text.isascii() else _LONE.sub(REPLACEMENT, text)


def replace_in_json(text: str) -> str:
    """Replace lone surrogates of a JSON text by U+FFFD, also those that are escapes."""
    if "\\u" in text:
        text = _ESCAPE.sub(_replace_escape, text)
    return replace_in_text(text)


def _replace_escape(found: re.Match[str]) -> str:
    return "\\ufffd" if found["lone"] else found[0]
