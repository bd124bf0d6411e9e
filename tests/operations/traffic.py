"""Traffic of everything that panels show, through two gateways, with a count of what was committed."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import redis

from kvrecall.client import InvalidRequest, KvrecallClient, Turn, TurnCompleted
from kvrecall.client.options import Logprobs
from kvrecall.client.sessions import EpisodeOptions
from tests.end_to_end.conftest import asks, chatter, user
from tests.end_to_end.servers import DEADLINE_SECONDS, Json, until

SETTINGS: Json = {
    "budget": 128,
    "research": {
        "method": "snapkv",
        "repair_rows": 32,
        "repair_on": ["tool_call", "tool_delta", "tool_result", "turn"],
    },
}
TOPICS = ("roses and tulips in the garden soil", "a ticket for the train at the station")
EPISODES: EpisodeOptions = {"count": 2}
CONCURRENT = 8
PLACEMENTS = 40
SYSTEM = {"role": "system", "content": chatter(3, 12)}


@dataclass
class Traffic:
    """Sends it through both gateways, and counts what they acknowledge."""

    clients: Sequence[KvrecallClient]
    urls: Sequence[str]
    catalog: "redis.Redis"
    counted: Counter[str] = field(default_factory=Counter)

    def run(self, seed: int) -> None:
        """Everything once; two runs increase every series that the first one began."""
        self.converse(seed)
        self.select_anew(seed)
        self.compare(seed)
        self.switch_episodes(seed)
        self.fail_by_client()
        self.fail_by_capacity(seed)
        self.fail_by_service(seed)

    def commit(self, client: KvrecallClient, session: str, *messages: Json, **options: Any) -> Turn:
        """Run a turn and count it."""
        return self._count(client.turn(session, messages, **options))

    def _count(self, turn: Turn) -> Turn:
        self.counted["turns"] += 1
        self.counted["output"] += turn.usage.output_tokens
        self.counted["prompt"] += turn.usage.prompt_tokens
        return turn

    def converse(self, seed: int) -> None:
        """Evictions, a pause with all its repairs, a stream, forks, a move and a takeover."""
        one, other = self.clients
        session = one.create_session(**SETTINGS, seed=seed).id
        self.commit(one, session, SYSTEM, user(chatter(seed, 40)), max_tokens=8)
        self.commit(one, session, asks("c1", name="Ada", thing="locker"), generate=False)
        self._repaired(one, session, "tool_call")
        one.event(session, "tool_call.started", "c1")
        one.event(session, "tool_call.delta", "c1", delta="The locker of Ada. " * 20)
        self._repaired(one, session, "tool_delta")
        one.event(session, "tool_call.completed", "c1", result="Its code is 1234.")
        self._repaired(one, session, "tool_result")
        self.commit(one, session, max_tokens=8)
        with one.stream(session, [user("And the garage of Ben?")], max_tokens=8) as events:
            for event in events:
                if isinstance(event, TurnCompleted):
                    self._count(event.turn)
        fork = one.fork(session).id
        one.fork(session, 1)
        self.commit(one, fork, user("Whose garden?"), max_tokens=4)
        one.move(session)
        self.commit(other, session, user("And the office?"), max_tokens=8)
        other.delete_session(fork)
        other.list_sessions()

    def _repaired(self, client: KvrecallClient, session: str, trigger: str) -> None:
        until(
            lambda: any(past.trigger == trigger for past in client.repairs(session, limit=20)),
            f"a repair on {trigger}",
        )

    def select_anew(self, seed: int) -> None:
        """An answer that re-selects its rows, and retrieves others, after a prompt over all of them."""
        one, _ = self.clients
        session = one.create_session(
            budget=128,
            research={
                "method": "snapkv",
                "repair_rows": 16,
                "reselect": {"every": 2},
                "retrieve": {"share": 0.25},
                "prefill": {"attend": "stored"},
            },
            seed=seed,
        ).id
        turn = self.commit(one, session, user(chatter(seed, 40)), max_tokens=8)
        assert turn.reselections is not None, "no rows were selected anew"
        assert turn.retrieval is not None, "no rows were retrieved"

    def compare(self, seed: int) -> None:
        """The divergence of a small budget from a large one."""
        one, other = self.clients
        full = one.create_session(budget=256, research={"method": "full"}, seed=seed).id
        answer = {"role": "assistant", "content": chatter(seed, 1)}
        messages = [SYSTEM, user(chatter(seed, 2)), answer]
        self.commit(one, full, *messages, generate=False, logprobs={"save": True})
        for _ in range(PLACEMENTS):
            small = other.create_session(
                **(SETTINGS | {"research": {"repair_on": []}}), seed=seed
            ).id
            with suppress(InvalidRequest):  # in another worker, which has no distributions
                compare: Logprobs = {"compare_with": full}
                compared = self.commit(other, small, *messages, generate=False, logprobs=compare)
                assert compared.fidelity is not None
                return
        raise AssertionError(f"{PLACEMENTS} sessions came to the other worker")

    def switch_episodes(self, seed: int) -> None:
        """Turns on two topics, one after the other."""
        one, _ = self.clients
        session = one.create_session(
            budget=64,
            research={"repair_rows": 16, "method": "epicache", "episodes": EPISODES},
            seed=seed,
        ).id
        for number in range(12):
            topic = TOPICS[number // 3 % 2]
            answer = {"role": "assistant", "content": f"Yes, {topic}."}
            segment = [user(f"About {topic}, {number}."), answer] * 2
            self.commit(one, session, *segment, generate=False)
        until(lambda: bool(one.episodes(session).episodes), "episodes")
        switched = 0
        for topic in (*TOPICS, *TOPICS):
            turn = self.commit(one, session, user(f"What about {topic}?"), max_tokens=4)
            switched += turn.episode is not None and turn.episode.switched
        assert switched, "no turn switched to another episode"

    def fail_by_client(self) -> None:
        """Turns of a session that is not there."""
        for url in self.urls:
            answer = self._post(url, "s_none")
            assert answer.status_code == 404, answer.text

    def fail_by_capacity(self, seed: int) -> None:
        """More turns at once than may run and wait."""
        one, _ = self.clients
        sessions = [one.create_session(**SETTINGS, seed=seed).id for _ in range(CONCURRENT)]
        with ThreadPoolExecutor(CONCURRENT) as threads:
            answers = list(threads.map(lambda each: self._post(self.urls[0], each, 200), sessions))
        for answer in answers:
            if answer.is_success:
                self.counted["turns"] += 1
                usage = answer.json()["usage"]
                self.counted["output"] += usage["output_tokens"]
                self.counted["prompt"] += usage["prompt_tokens"]
        assert {answer.status_code for answer in answers} == {200, 429}

    def fail_by_service(self, seed: int) -> None:
        """A turn while the catalog's Redis is out of memory."""
        one, _ = self.clients
        session = one.create_session(**SETTINGS, seed=seed).id
        self.catalog.config_set("maxmemory", 1)
        try:
            answer = self._post(self.urls[0], session)
        finally:
            self.catalog.config_set("maxmemory", 0)
        assert answer.status_code == 507, answer.text
        self.commit(one, session, user("Again?"), max_tokens=4)

    def _post(self, url: str, session: str, tokens: int = 4) -> httpx.Response:
        body = {"messages": [user("Who?")], "max_tokens": tokens}
        return httpx.post(f"{url}/v1/sessions/{session}/turns", json=body, timeout=DEADLINE_SECONDS)
