"""Parts of a content in OpenAI's APIs: text, and words for what is none."""

from collections.abc import Mapping
from typing import Any

from gateway.conversation.ignored import Tolerance
from gateway.conversation.placeholders import describe, describe_data, describe_url, join_pieces
from kvrecall.domain.errors import InvalidRequest

Json = Mapping[str, Any]
Content = str | list[dict[str, Any]] | None
_TEXTS: Mapping[str, str] = {
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
}
# Kinds of parts that hold no text, by their types in chat completions and in responses.
_KINDS: Mapping[str, str] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
    "computer_screenshot": "image",
    "encrypted_content": "encrypted text",
}
# Reasoning of an answer: the session has it as it was said, so what a client repeats is not read.
_UNREAD = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text"})


def join_parts(content: Content, field: str, tolerance: Tolerance) -> str:
    """Return the text of a content in parts.

    Raises InvalidRequest for an unknown part, and where the operator wants it for one without text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return join_pieces(
        (read_part(part, f"{field}[{index}]", tolerance), str(part.get("type")) in _KINDS)
        for index, part in enumerate(content)
    )


def is_text(part: Json) -> bool:
    """Return whether a part holds its text itself."""
    return str(part.get("type")) in _TEXTS


def read_part(part: Json, field: str, tolerance: Tolerance) -> str:
    """Return the text of a part, or words for it. Raises as `join_parts`."""
    kind = str(part.get("type"))
    if kind in _TEXTS:
        return _read_text(part, _TEXTS[kind], field)
    if kind in _UNREAD:
        return ""
    if kind not in _KINDS:
        wanted = ", ".join(repr(known) for known in ("text", "image_url", "input_audio", "file"))
        message = f"Invalid value: {part.get('type')!r}. Supported values are: {wanted}."
        raise InvalidRequest(f"{field}.type", message, openai_code="invalid_value")
    return tolerance.replace(field, kind, _describe(_KINDS[kind], part))


def _read_text(part: Json, member: str, field: str) -> str:
    text = part.get(member)
    if isinstance(text, str):
        return text
    given = "null" if text is None else type(text).__name__
    message = f"Invalid type for '{field}.{member}': expected a string, but got {given} instead."
    raise InvalidRequest(f"{field}.{member}", message, openai_code="invalid_type")


def _describe(kind: str, part: Json) -> str:
    """Return the words for a part: its members are nested in chat completions, flat in responses."""
    nested = part.get(str(part["type"]), part)
    inner: Json = nested if isinstance(nested, dict) else part
    url = nested if isinstance(nested, str) else _get(inner, "url", "image_url", "file_url")
    name = _get(inner, "filename", "file_id")
    data = _get(inner, "data", "file_data")
    if not url and not data:
        return describe(kind, name)
    if data and not data.startswith("data:"):
        form = _get(inner, "format")
        return describe_data(
            kind, f"{kind}/{form}" if form else "application/octet-stream", data, name
        )
    return describe_url(kind, url or data, name)


def _get(part: Json, *names: str) -> str:
    """Return the first of these members that is a text; empty if none is."""
    for name in names:
        value = part.get(name)
        if isinstance(value, str) and value:
            return value
    return ""
