"""Compaction: a summary by the model stands for a conversation that has become too long.

The item that carries it is opaque to clients, as OpenAI's is. It is not encrypted: it holds nothing
that its client has not said or read.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any

from gateway.openai.responses.ids import TurnName
from kvrecall.domain.messages import Message

Json = dict[str, Any]

INSTRUCTION = (
    "The conversation above ends here, and another assistant will go on with it from your summary "
    "alone. Write this summary: what the user wants, what was decided and done, what was found out "
    "that is still needed (names, numbers, paths, exact texts), and what is to be done next."
)
"""What the model is asked for behind the conversation."""

_MARK = "kvrecall.summary.1."
_INTRODUCTION = "Summary of the conversation so far:\n"
_FOREIGN = "[an earlier part of the conversation, which this model cannot read]"


def build_compacted(
    name: TurnName, created: int, said: Sequence[str], summary: str, usage: Json
) -> Json:
    """Build a compacted conversation: what users have said, then the item with the summary."""
    users = [
        {
            "id": name.item("message", "o", number),
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
        for number, text in enumerate(said)
    ]
    content = base64.urlsafe_b64encode(summary.encode()).decode()
    compaction = {
        "id": name.item("compaction", "o", len(said)),
        "type": "compaction",
        "encrypted_content": f"{_MARK}{content}",
    }
    return {
        "id": name.response,
        "object": "response.compaction",
        "created_at": created,
        "output": [*users, compaction],
        "usage": usage,
    }


def tell_compaction(content: object) -> Message:
    """Return the message that stands for such an item in a prompt; another service's cannot be read."""
    summary = _read(content) if isinstance(content, str) else None
    return Message("user", _FOREIGN if summary is None else f"{_INTRODUCTION}{summary}")


def _read(content: str) -> str | None:
    if not content.startswith(_MARK):
        return None
    try:
        return base64.b64decode(content.removeprefix(_MARK), b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
