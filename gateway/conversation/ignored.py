"""What of a request was left out or replaced: collected while it is read, named in one header.

The absence of these parts does not make the answer wrong, so the request is answered all the same.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.tolerance.ignored import Ignored

HEADER = "kvrecall-ignored"
_MAX_HEADER = 1000
_UNSAFE = re.compile(r"[^!-+\--~ ]")  # a comma separates
_DATE = re.compile(r"_\d{8}$")


@dataclass(frozen=True)
class IgnoredParts:
    """The parts of one request that are not taken as they were sent, in order, each once."""

    _parts: dict[Ignored, None] = field(default_factory=dict)

    def note(self, name: str, what: str = "") -> None:
        """Note the part at a field, with its kind or what was done about it."""
        self._parts[Ignored(name, what)] = None

    def __iter__(self) -> Iterator[Ignored]:
        return iter(tuple(self._parts))


@dataclass(frozen=True)
class Tolerance:
    """What becomes of a part that no model here can read: replaced and noted, or refused."""

    mends: bool
    ignored: IgnoredParts

    def replace(self, name: str, what: str, text: str) -> str:
        """Note the part at a field and return the text that stands for it.

        Raises InvalidRequest where the operator wants it refused.
        """
        if not self.mends:
            message = f"parts of type {what!r} are not supported; send text"
            raise InvalidRequest(name, message, openai_code="unsupported_content")
        self.ignored.note(name, what)
        return text


def format_header(parts: Iterable[Ignored]) -> str:
    """Build the header's value: ASCII, of bounded length; what has no room is counted."""
    texts = [_format_part(each) for each in parts]
    value = ""
    for number, text in enumerate(texts):
        longer = f"{value}, {text}" if value else text
        if len(longer) > _MAX_HEADER:
            return f"{value}, and {len(texts) - number} more"
        value = longer
    return value


def _format_part(part: Ignored) -> str:
    """Name a part; a field of white space alone is a question mark, as a header ends on no space."""
    text = _UNSAFE.sub("?", f"{part.field} {part.what}")
    return text.strip()[:120].strip() or "?"


def get_labels(parts: Iterable[Ignored]) -> tuple[str, ...]:
    """Return the names under which the parts are counted, each once: member and kind."""
    labels: dict[str, None] = {}
    for each in parts:
        member = re.split(r"[.\[]", each.field, maxsplit=1)[0]
        what = _DATE.sub("", each.what).replace(" ", "_")
        labels[f"{member}_{what}" if what else member] = None
    return tuple(labels)
