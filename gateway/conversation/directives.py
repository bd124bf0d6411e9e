"""Headers `kvrecall-...` of requests for an answer, and of answers: what is not honoured.

A header says the same as a part of the member `kvrecall` of the body, for clients whose framework
can send headers only. A header comes before the body; one that is not known is refused, since it
was meant to change the answer. Only a salt has to be the same in header and body: a proxy that isolates its
users sets it, and a client must not replace it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json

from gateway.conversation.bodies import ConversationBody
from gateway.conversation.ignored import HEADER, format_header, get_labels
from gateway.http.bodies.parsing import is_mended
from gateway.rest.schemas.answers import DirectionBody
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.events import MembersIgnored
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.tolerance.ignored import Ignored
from services.service import SessionService

Body = TypeVar("Body", bound=ConversationBody)
Members = dict[str, Any]

_PREFIX = "kvrecall-"
_FLAGS: Mapping[str, bool] = {"true": True, "false": False}
# Headers of earlier versions, with an example of the one that says the same.
_MOVED: Mapping[str, str] = {
    "method": 'kvrecall-research: {"method": "snapkv"}',
    "repair": 'kvrecall-research: {"repair_rows": 64, "repair_on": ["tool_result"]}',
}
# Members that are known and have no effect: they are not counted as ignored.
_NOTED = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
# Values of a member that ask for nothing.
_NOTHING: Sequence[object] = (None, False, "", [], {})
# The most tokens that an answer may have, by the names of all APIs; the first one that is given counts.
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def read_directives(request: Request, body: Body) -> Body:
    """Return the body with what the headers say in its member `kvrecall`.

    Members that are not known are noted by their names, if they ask for something. Raises
    InvalidRequest with the name of a header.
    """
    known = _NOTED.union(body.honoured)
    for name, value in (body.model_extra or {}).items():
        if name not in known and value not in _NOTHING:
            body.ignored.note(name)
    if is_mended(request.scope):
        body.ignored.note("body", "surrogates")
    settings = body.kvrecall
    salts = {body.cache_salt, settings.cache_salt}
    for name, value in request.headers.items():
        if name.startswith(_PREFIX):
            settings = _update(settings, name, _read(name, value))
            salts.add(settings.cache_salt)
    if len(salts - {None}) > 1:
        message = "the body and the headers kvrecall-cache-salt name different salts; send one"
        raise InvalidRequest("cache_salt", message)
    return body if settings is body.kvrecall else body.model_copy(update={"kvrecall": settings})


def report_changes(
    service: SessionService,
    body: ConversationBody,
    rename: Callable[[str], str] = lambda field: field,
) -> Callable[[Sequence[Ignored]], Mapping[str, str]]:
    """Return a function that reports what of a request was not taken as it was sent, in headers.

    It is given what was mended in the messages, whose places `rename` names as the client does.
    """

    def report(mended: Sequence[Ignored]) -> Mapping[str, str]:
        for each in mended:
            body.ignored.note(rename(each.field), each.what)
        headers = {}
        parts = tuple(body.ignored)
        if parts:
            headers[HEADER] = format_header(parts)
            service.publish(MembersIgnored(get_labels(parts), headers[HEADER]))
        clamped = find_clamped(body, service.limits)
        if clamped:
            headers["kvrecall-clamped"] = clamped
        return headers

    return report


def find_clamped(body: ConversationBody, limits: ServiceLimits) -> str:
    """Return the name of the member that is cut to a limit of the service; empty if none is."""
    for name in _LENGTHS:
        value = getattr(body, name, None)
        if value is not None:
            return name if value > limits.cut_length(value) else ""
    return ""


def _read(name: str, value: str) -> Members:
    """Return the members of `kvrecall` that a header stands for. Raises InvalidRequest."""
    match name.removeprefix(_PREFIX):
        case "budget":
            plain = value.isascii() and value.isdigit() and len(value) < 10
            return {"budget": int(value) if plain else value}
        case "session" | "history" | "retain" | "remember" as member:
            return {member: value}
        case "cache-salt":
            return {"cache_salt": value}
        case "recall" if value in _FLAGS:
            return {"recall": _FLAGS[value]}
        case "recall":
            raise InvalidRequest(name, f"{name} is {value!r}; expected one of {', '.join(_FLAGS)}")
        case "research":
            return {"research": _parse(name, value)}
        case "method" | "repair" as moved:
            raise InvalidRequest(name, f"{name} is now a member of a JSON object: {_MOVED[moved]}")
        case "trim" if value == "honour":
            return {}
    message = f"the header {name} is not supported here with this value; leave it out"
    raise InvalidRequest(name, message, openai_code="unsupported_parameter")


def _parse(name: str, value: str) -> Any:
    """Parse the JSON of a header. Raises InvalidRequest."""
    try:
        return from_json(value, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(name, f"{name} is no JSON: {error}") from error


def _update(settings: DirectionBody, header: str, members: Members) -> DirectionBody:
    """Return the settings with other members. Raises InvalidRequest with the name of the header."""
    known = settings.model_dump(mode="json", exclude_unset=True)
    try:
        return DirectionBody.model_validate({**known, **members})
    except ValidationError as error:
        raise InvalidRequest(header, error.errors()[0]["msg"]) from error
