"""OpenAI's APIs as their clients use them: an answer, whole or from a stream that adds up to it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from gateway.http.tenants import TENANT_HEADER
from kvrecall.client import ConnectionFailed, KvrecallError, StreamBroken

Json = dict[str, Any]
MODELS = "/v1/models"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
CONVERSATIONS = "/v1/conversations"
_LAST_EVENTS = ("response.completed", "response.incomplete")


class TornStreamError(Exception):
    """A stream whose events do not add up to its answer."""


@dataclass(frozen=True)
class Answer:
    """Text, end and token counts of an answer, and where it was given.

    `match` says how its session was found; `response` is its id, if it has one.
    """

    text: str
    ended: str
    prompt_tokens: int
    output_tokens: int
    session: str
    match: str
    response: str


@dataclass(frozen=True)
class Requester:
    """Sends a tenant's requests to a gateway; each waits up to `seconds` for data."""

    url: str
    tenant: str
    seconds: float

    def send(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send a request and return the object of its response. Raises KvrecallError."""
        try:
            response = httpx.request(
                method,
                f"{self.url}{path}",
                json=body,
                headers={TENANT_HEADER: self.tenant},
                timeout=self.seconds,
            )
        except httpx.HTTPError as error:
            raise ConnectionFailed(repr(error)) from error
        _check_status(response)
        found: Json = response.json()
        return found

    def answer(
        self, path: str, body: Json, key: str | None, heard: Callable[[int], None] = lambda _: None
    ) -> Answer:
        """Ask for an answer; `heard` gets the number of each event of its stream.

        Raises KvrecallError, TornStreamError.
        """
        headers = {TENANT_HEADER: self.tenant} | ({} if key is None else {"Idempotency-Key": key})
        try:
            with httpx.stream(
                "POST", f"{self.url}{path}", json=body, headers=headers, timeout=self.seconds
            ) as response:
                if response.status_code >= 400 or not body.get("stream"):
                    response.read()
                    _check_status(response)
                    return _build(path, response.json(), response.headers)
                events = _count(_parse(response.iter_lines()), heard)
                join = _join_chunks if path == CHAT else _join_events
                return _build(path, join(events), response.headers)
        except httpx.HTTPError as error:
            raise ConnectionFailed(repr(error)) from error


def _check_status(response: httpx.Response) -> None:
    if response.status_code < 400:
        return
    try:
        error = response.json()["error"]
    except (ValueError, KeyError):
        error = {"code": "no_error_object", "message": response.text[:200]}
    raise KvrecallError(error["message"], error["code"] or "", response.status_code)


def _build(path: str, found: Json, headers: Mapping[str, str]) -> Answer:
    place = (headers["kvrecall-session"], headers["kvrecall-match"])
    usage = found["usage"]
    if path == CHAT:
        choice = found["choices"][0]
        text = choice["message"]["content"] or ""
        tokens = (usage["prompt_tokens"], usage["completion_tokens"])
        return Answer(text.rstrip(), choice["finish_reason"], *tokens, *place, "")
    tokens = (usage["input_tokens"], usage["output_tokens"])
    return Answer(read_text(found["output"]), found["status"], *tokens, *place, found["id"])


def read_text(items: list[Json]) -> str:
    """Return the text of the messages among the items of a response or a conversation."""
    messages = [item for item in items if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


def _parse(lines: Iterator[str]) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in lines if line.startswith("data: "))


def _count(events: Iterator[str], heard: Callable[[int], None]) -> Iterator[str]:
    for number, event in enumerate(events):
        heard(number)
        yield event


def _join_chunks(events: Iterator[str]) -> Json:
    """Put a completion together from its chunks. Raises StreamBroken, KvrecallError."""
    text = ""
    ended = None
    usage: Json = {}
    for event in events:
        if event == "[DONE]":
            message = {"content": text}
            return {"choices": [{"message": message, "finish_reason": ended}], "usage": usage}
        chunk = json.loads(event)
        if "error" in chunk:
            raise KvrecallError(chunk["error"]["message"], chunk["error"]["code"] or "", 503)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            ended = choice["finish_reason"] or ended
    raise StreamBroken


def _join_events(events: Iterator[str]) -> Json:
    """Return the response that a stream ends with. Raises StreamBroken, TornStreamError."""
    text = ""
    for number, event in enumerate(map(json.loads, events)):
        if event["sequence_number"] != number:
            raise TornStreamError(f"event {event['sequence_number']} after {number} others")
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        if event["type"] == "response.failed":
            raise StreamBroken
        if event["type"] in _LAST_EVENTS:
            response: Json = event["response"]
            if text != (said := read_text(response["output"])):
                raise TornStreamError(f"{text!r}, but {said!r}")
            return response
    raise StreamBroken
