"""The check of responses and conversations that a file brings with a session."""

import json
from collections.abc import Iterator

from kvrecall_server.admin.archive.answers import Answers
from kvrecall_server.admin.validation.values import check_values, is_id


def validate_answers(answers: Answers) -> list[str]:
    """Return what is wrong with a session's responses and conversations; empty if nothing is."""
    return list(_check(answers))


def _check(answers: Answers) -> Iterator[str]:
    for response in answers.responses:
        yield from _check_id(response.id)
        yield from _check_body(response.body, response.id)
        yield from check_values(response, "a response")
    for conversation, items in answers.conversations:
        yield from _check_id(conversation.id)
        yield from check_values(conversation, "a conversation")
        for item in items:
            yield from _check_id(item.id)
            yield from _check_body(item.body, item.id)
            yield from check_values(item, "an item")


def _check_id(id: str) -> Iterator[str]:
    if not is_id(id):
        yield f"{id[:80]!r} is no id of a response, a conversation or an item"


def _check_body(body: str, id: str) -> Iterator[str]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        yield f"the body of {id[:80]!r} is no JSON object"
