"""SIGKILL of the gateway or the worker behind any event of a stream: the next request goes on.

A conversation of three requests is held undisturbed, then again with a kill in the second answer,
through each API of stateless clients. Whatever was killed, the answers are the same ones.
"""

import itertools
import json
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.end_to_end.servers import DEADLINE_SECONDS, Cluster

Json = dict[str, Any]
MODEL = "endless"
TOKENS = 12
# Kills of each kind; their places are drawn once, the first and the last event among them. The faults
# kill behind every event.
KILLS = {"gateway": 3, "worker": 2}
APIS = ("chat/completions", "responses", "messages")


@dataclass(frozen=True)
class Answer:
    """An answer's text, its id, the events it came in, and whether the last one was among them."""

    text: str
    id: str
    events: list[Json]
    ended: bool
    headers: Mapping[str, str]


class Conversation:
    """A conversation through one of the APIs: requests say all of it, or name what came before."""

    def __init__(self, cluster: Cluster, api: str, seed: int) -> None:
        self.api = api
        self._cluster = cluster
        self._settings = {
            "budget": 128,
            "research": {"method": "snapkv", "repair_rows": 32},
            "seed": seed,
        }
        self._said: list[Json] = []
        self._previous = ""

    def say(self, text: str) -> None:
        """Add a user's message."""
        self._said.append({"role": "user", "content": text})

    def hear(self, answer: Answer) -> str:
        """Add an answer; returns its text."""
        self._said.append({"role": "assistant", "content": answer.text})
        self._previous = answer.id
        return answer.text

    def ask(self, kill_after: int | None = None, kill: Callable[[str], object] = str) -> Answer:
        """Request a streamed answer; behind so many of its events something is killed."""
        events: list[Json] = []
        ended = False
        url = f"{self._cluster.url}/v1/{self.api}"
        with (
            httpx.Client(timeout=DEADLINE_SECONDS) as http,
            http.stream("POST", url, json=self._build_request()) as response,
        ):
            response.raise_for_status()
            try:
                for line in response.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    data = line.removeprefix("data: ")
                    events.append({} if data == "[DONE]" else json.loads(data))
                    ended = ended or _is_end(events[-1])
                    if len(events) == kill_after:
                        kill(response.headers["kvrecall-session"])
            except httpx.TransportError:
                assert kill_after is not None, "nothing was killed"
        text = "".join(map(_get_text, events))
        return Answer(text.strip(), _get_id(events), events, ended, response.headers)

    def _build_request(self) -> Json:
        request: Json = {
            "model": MODEL,
            "temperature": 0,
            "stream": True,
            "kvrecall": self._settings,
        }
        if self.api != "responses":
            return request | {"messages": self._said, "max_tokens": TOKENS}
        named = {"previous_response_id": self._previous} if self._previous else {}
        return request | named | {"input": self._said[-1:], "max_output_tokens": TOKENS}


def _is_end(event: Json) -> bool:
    return (
        not event
        or event.get("type") in ("response.completed", "response.incomplete")
        or (event.get("type") == "message_stop")
    )


def _get_text(event: Json) -> str:
    """The text that an event of any of the APIs adds."""
    if choices := event.get("choices"):
        return choices[0]["delta"].get("content") or ""
    delta = event.get("delta", "")
    if event.get("type") == "content_block_delta":
        return str(delta["text"])
    return str(delta) if event.get("type") == "response.output_text.delta" else ""


def _get_id(events: list[Json]) -> str:
    first = events[0]
    return str((first.get("response") or first.get("message") or first)["id"])


@pytest.fixture(scope="module")
def cluster(new_cluster: Callable[..., Cluster]) -> Iterator[Cluster]:
    cluster = new_cluster(KVRECALL_GATEWAY__MODEL_ALIASES=f'["{MODEL}"]')
    cluster.start()
    yield cluster
    cluster.kill()


@pytest.fixture(scope="module")
def texts(say: Any) -> list[str]:
    """What the user says: only who has heard the second message can answer the third."""
    fact = "Please note that the badge list says Melnor K4821."
    return [say.chatter(300, 16), fact, "What is Melnor's badge?"]


def hold(
    cluster: Cluster, api: str, seed: int, texts: list[str], kill_after: int | None, kill: Any
) -> tuple[list[str], Answer]:
    """Hold the conversation with a kill in its second answer, asked for again unless it ended.

    Returns the texts of the answers with the session's length, and the second one as it came at first.
    """
    talk = Conversation(cluster, api, seed)
    talk.say(texts[0])
    heard = [talk.hear(talk.ask())]
    talk.say(texts[1])
    cut = talk.ask(kill_after, kill)
    for gateway in cluster.gateways:
        if gateway.running is None:
            gateway.start()
    cluster.close()
    cluster.back()
    heard.append(talk.hear(cut if cut.ended else talk.ask()))
    talk.say(texts[2])
    last = talk.ask()
    assert last.headers["kvrecall-match"] == "continued", "the session holds all that was said"
    length = cluster.own.get_session(last.headers["kvrecall-session"]).length
    return [*heard, talk.hear(last), f"{length} tokens"], cut


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("victim", KILLS)
def test_after_a_kill_behind_any_event_of_a_stream_the_conversation_goes_on(
    cluster: Cluster, texts: list[str], api: str, victim: str
) -> None:
    seeds = itertools.count(100 * (2 * APIS.index(api) + (victim == "worker")))
    undisturbed, whole = hold(cluster, api, next(seeds), texts, None, None)
    assert whole.ended
    assert "Melnor K48" in undisturbed[2]

    def kill(session: str) -> None:
        process = cluster.gateways[0] if victim == "gateway" else cluster.owner(session)
        process.end(signal.SIGKILL)

    count = len(whole.events)
    drawn = random.Random(f"{api} {victim}").sample(range(2, count - 1), KILLS[victim] - 2)
    for place in sorted({1, *drawn, count}):
        heard, cut = hold(cluster, api, next(seeds), texts, place, kill)
        assert heard == undisturbed, f"{victim} killed behind event {place} of {count}"
        assert cut.ended or victim == "gateway", "another worker ends the stream"
