"""Tools of the generated conversations, each of which looks up a person."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolKind:
    """A tool with one argument whose result names a person.

    `asks` are the user's questions, with `{argument}` and `{attribute}` as blanks. `examples` are
    possible arguments; empty if the argument is a random number.
    """

    name: str
    description: str
    argument: str
    result: str
    asks: tuple[str, ...]
    examples: tuple[str, ...]

    def draw_argument(self, rng: random.Random) -> str:
        """Draw an argument."""
        return rng.choice(self.examples) if self.examples else f"{rng.randrange(1000):03d}"

    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form."""
        parameters = {
            "type": "object",
            "properties": {self.argument: {"type": "string"}},
            "required": [self.argument],
        }
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": parameters,
            },
        }


TOOLS = (
    ToolKind(
        "on_call",
        "Who is on call on a day.",
        "day",
        "person",
        (
            "Who is on call {argument}, and what is their {attribute}?",
            "Find out who is on call {argument} and tell me their {attribute}.",
        ),
        (
            "tonight",
            "today",
            "tomorrow",
            "Monday",
            "Tuesday",
            "Wednesday",
            "Thursday",
            "Friday",
            "Saturday",
            "Sunday",
        ),
    ),
    ToolKind(
        "ticket_owner",
        "Who owns a ticket.",
        "ticket",
        "owner",
        (
            "Who owns ticket {argument}, and what is their {attribute}?",
            "Look up the owner of ticket {argument} and tell me their {attribute}.",
        ),
        (),
    ),
    ToolKind(
        "room_booking",
        "Who booked a room.",
        "room",
        "guest",
        (
            "Who booked room {argument}, and what is their {attribute}?",
            "Check who booked room {argument} and give me their {attribute}.",
        ),
        (),
    ),
    ToolKind(
        "team_lead",
        "Who leads a team.",
        "team",
        "lead",
        (
            "Who leads the {argument} team, and what is their {attribute}?",
            "Find the lead of the {argument} team and give me their {attribute}.",
        ),
        ("sales", "support", "design", "finance", "legal", "security", "network", "research"),
    ),
    ToolKind(
        "last_caller",
        "Who called a line last.",
        "line",
        "caller",
        (
            "Who called line {argument} last, and what is their {attribute}?",
            "See who called line {argument} last and tell me their {attribute}.",
        ),
        (),
    ),
)
