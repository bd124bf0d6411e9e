"""A served console, and conversations for it."""

import base64
import signal
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx

from kvrecall.client import Message
from tests.end_to_end.servers import Process

FACT = "Melnor K4821"
ON_CALL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "on_call",
        "description": "Who is on call on a day.",
        "parameters": {
            "type": "object",
            "properties": {"day": {"type": "string"}},
            "required": ["day"],
        },
    },
}
SMALL_TALK = [
    Message.user("Hi, are you there?"),
    Message("assistant", "Yes, I am here."),
    Message.user("There is a dull race near the match."),
    Message("assistant", "I see, sport it is."),
    Message.user("Someone asked me about the match today."),
    Message("assistant", "Tell me more about the stadium."),
]


@dataclass
class Console:
    """A running `kvrecall serve`, and addresses of its console."""

    process: Process

    @property
    def url(self) -> str:
        """Address of the service."""
        return self.process.address

    def page(self, path: str = "", **query: object) -> str:
        """Address of a page of the console."""
        return f"{self.url}/console/{path}{'?' + urlencode(query) if query else ''}"

    def session(self, session: str, page: str = "", /, **query: object) -> str:
        """Address of a page of a session."""
        return self.page(f"sessions/{session}{'/' + page if page else ''}", **query)

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at a path of the API."""
        answer = httpx.get(f"{self.url}{path}", params=query, timeout=60)
        return answer.raise_for_status().json()

    def tokens(self, session: str) -> list[dict[str, Any]]:
        """All tokens of a session."""
        path = f"/v1/sessions/{session}/memory/tokens"
        tokens: list[dict[str, Any]] = []
        more = True
        while more:
            page = self.get(path, start=len(tokens), stop=len(tokens) + 512)
            tokens += page["tokens"]
            more = len(tokens) < page["log_length"]
        return tokens

    def map(self, session: str, **query: Any) -> tuple[dict[str, Any], list[tuple[bytes, bytes]]]:
        """The map of a session, and the active and promoted bytes of its layers."""
        answer = self.get(f"/v1/sessions/{session}/memory/map", **query)
        decode = base64.b64decode
        layers = [(decode(each["active"]), decode(each["promoted"])) for each in answer["layers"]]
        return answer, layers

    def restart(self) -> None:
        """Kill it and start it again at the same address."""
        self.kill()
        self.process.start()

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self.process.end(signal.SIGKILL)


def find(tokens: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The tokens of the first place of a text."""
    whole = "".join(token["text"] for token in tokens)
    begin = whole.index(text)
    found, offset = [], 0
    for token in tokens:
        end = offset + len(token["text"])
        if end > begin and offset < begin + len(text):
            found.append(token)
        offset = end
    return found
