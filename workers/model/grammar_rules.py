"""Rules of a grammar in Lark's syntax, as llguidance reads it, with a form's marks as tokens."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.domain.answer.constraints import to_grammar_schema
from workers.model.calls.grammar import LINE, NUMBER

PATTERNS = {LINE: r"/\n?/", NUMBER: "/[0-9]+/"}
"""Pieces of a form that are no fixed text."""


@dataclass
class Rules:
    """Rules of a grammar, under names of their own.

    `tokens`: ids of the tokens that are marks; `special`: those of them that no text matches.
    """

    tokens: Mapping[str, int]
    special: Collection[str] = ()
    lines: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def reserve(self) -> str:
        """Reserve the name of a rule that is defined later, since its own parts refer to it."""
        self.lines.append("")
        return f"r{len(self.lines) - 1}"

    def define(self, name: str, body: str, attributes: str = "") -> None:
        """Define a rule whose name was reserved."""
        self.lines[int(name[1:])] = f"{name}{attributes}: {body}"

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule; returns its name."""
        name = self.reserve()
        self.define(name, body, attributes)
        return name

    def json(self, schema: dict[str, Any], strict: bool) -> str:
        """Add the rule of a JSON value; returns its name."""
        return self.add(f"%json {json.dumps(to_grammar_schema(schema, strict))}")

    def nest(self, grammar: str) -> str:
        """Add a grammar of its own; returns the reference to it."""
        self.texts.append(grammar)
        return f"@text{len(self.texts) - 1}"

    def text(self, *pieces: str) -> str:
        """Write pieces of text, with marks as their tokens."""
        written: list[str] = []
        for piece in pieces:
            if piece in PATTERNS:
                written.append(PATTERNS[piece])
                continue
            pattern = "|".join(map(re.escape, self.tokens)) or "(?!)"
            for part in re.split(f"({pattern})", piece):
                if part in self.tokens:
                    written.append(f"<[{self.tokens[part]}]>")
                elif part:
                    written.append(json.dumps(part))
        return " ".join(written)

    def any_until(self, closing: str) -> str:
        """Add the rule of any text up to `closing`, whatever it is; returns it with that."""
        if any(closing.startswith(mark) for mark in self.special):
            return f"{self.add('/(?s:.*)/')} {self.text(closing)}"
        return self.add("/(?s:.*)/", f"[suffix={json.dumps(closing)}]")

    def members(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Add the rule of members in this order, of which only the required ones have to come; returns its name.

        members: for each the name of its rule, and whether it is required.
        """
        first = following = '""'
        for rule, required in reversed(members):
            left_out = ("", "") if required else (f" | {first}", f" | {following}")
            first, behind = self.add(f"{rule} {following}{left_out[0]}"), following
            following = (
                self.add(f"{self.text(separator)} {rule} {behind}{left_out[1]}")
                if separator
                else first
            )
        return first

    def framed(self, before: str, plain: str, after: str) -> str:
        """Write a client's text between two of the form's: a mark in it is text like any other."""
        return " ".join(filter(None, (self.text(before), json.dumps(plain), self.text(after))))
