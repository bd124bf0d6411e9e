"""Metered tokens against computed ones, over mixed requests of which half end early.

The workers count every token that passes their model for a session; the gateway charges what it was
told of. After all jobs have ended the two are to be equal.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from faults.rig.metrics import sum_metrics

TEXT = "the harbour keeps its old lamps burning while ships wait for morning tides and bread"
WORDS = TEXT.split()
COMPUTED, METERED = "kvrecall_worker_computed_tokens_total", "kvrecall_computed_tokens_total"
_AT_ONCE = 6
_SETTLED_SECONDS = 120.0


@dataclass(frozen=True)
class Tokens:
    """Tokens that the workers computed, and those that gateways have counted."""

    computed: int
    metered: int

    def since(self, before: "Tokens") -> "Tokens":
        """Return what came after `before`."""
        return Tokens(self.computed - before.computed, self.metered - before.metered)


class Mixture:
    """Requests of some kinds, each drawn by a seeded generator; `ends` counts how they ended."""

    def __init__(self, http: httpx.AsyncClient, seed: int) -> None:
        self._http = http
        self._random = random.Random(seed)
        self._model = ""
        self.ends: Counter[str] = Counter()

    async def run(self, requests: int) -> None:
        """Send so many requests, a few at once; of two in a row one is to end early."""
        self._model = (await self._http.get("/v1/models")).json()["data"][0]["id"]
        whole: list[Callable[[], Awaitable[str]]] = [self._answer, self._session, self._choices]
        early = [self._cut_stream, self._leave, self._refused, self._too_long]
        places = asyncio.Semaphore(_AT_ONCE)

        async def send(request: Callable[[], Awaitable[str]]) -> None:
            async with places:
                self.ends[await request()] += 1

        chosen = [self._random.choice(early if n % 2 else whole) for n in range(requests)]
        await asyncio.gather(*map(send, chosen))

    async def _answer(self) -> str:
        return _name("answered", await self._post(self._chat(self._random.randint(1, 24))))

    async def _choices(self) -> str:
        return _name("answered", await self._post(self._chat(6) | {"n": 2}))

    async def _session(self) -> str:
        """Two turns of a session and a fork, with the repairs and settling between them."""
        made = await self._http.post(
            "/v1/sessions",
            json={"budget": 128, "research": {"method": "snapkv", "repair_rows": 16}},
        )
        path = f"/v1/sessions/{made.json()['id']}"
        for tokens in (150, 20):
            turn = {"messages": [_user(self._say(tokens))], "max_tokens": 8}
            answer = await self._http.post(f"{path}/turns", json=turn)
        await self._http.post(f"{path}/fork", json={"turn": 1})
        await self._http.delete(path)
        return _name("answered", answer)

    async def _cut_stream(self) -> str:
        """Read some pieces of a stream, then hang up."""
        body = self._chat(200) | {"stream": True, "ignore_eos": True}
        left = self._random.randint(1, 12)
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                left -= '"content"' in line
                if left <= 0:
                    return "cut"
        return _name("not cut", answer)

    async def _leave(self) -> str:
        """Hang up before there is an answer, perhaps in the middle of the prompt."""
        sent = asyncio.create_task(self._post(self._chat(200, 400) | {"ignore_eos": True}))
        await asyncio.sleep(self._random.uniform(0.01, 0.3))
        sent.cancel()
        ended = (await asyncio.gather(sent, return_exceptions=True))[0]
        return "left" if isinstance(ended, asyncio.CancelledError) else "too fast to leave"

    async def _refused(self) -> str:
        """Ask for an answer in the form of a grammar that is none."""
        body = self._chat(8) | {"response_format": {"type": "json_schema", "json_schema": _BAD}}
        return _name("answered", await self._post(body))

    async def _too_long(self) -> str:
        """Send a prompt that does not fit the model's context, to a session that ends with it."""
        body = self._chat(1, 40_000) | {"kvrecall": {"recall": False}}
        return _name("answered", await self._post(body))

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        return await self._http.post("/v1/chat/completions", json=body)

    def _chat(self, max_tokens: int, words: int = 60) -> dict[str, Any]:
        messages = [_user(self._say(words))]
        return {"model": self._model, "messages": messages, "max_tokens": max_tokens}

    def _say(self, words: int) -> str:
        return " ".join(self._random.choices(WORDS, k=words))


_BAD = {"name": "bad", "strict": True, "schema": {"type": "string", "pattern": "("}}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _name(end: str, answer: httpx.Response) -> str:
    return end if answer.is_success else f"refused {answer.status_code}"


async def count_tokens(http: httpx.AsyncClient, operations: Sequence[str] = ()) -> Tokens:
    """Count the tokens once all jobs have ended, of a gateway and the workers at `operations`."""
    pages = ["/metrics", *(f"http://{address}/metrics" for address in operations)]
    before = None
    async with asyncio.timeout(_SETTLED_SECONDS):
        while True:
            sums = Counter[str]()
            for page in pages:
                sums.update(sum_metrics((await http.get(page)).text))
            found = Tokens(int(sums[COMPUTED]), int(sums[METERED]))
            if found == before and not sums["kvrecall_worker_jobs"]:
                return found
            before = found
            await asyncio.sleep(0.5)


async def measure(
    url: str, requests: int, seed: int, operations: Sequence[str] = ()
) -> tuple[Tokens, Counter[str]]:
    """Run a mixture; return what was computed and metered for it, and how its requests ended."""
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as http:
        before = await count_tokens(http, operations)
        mixture = Mixture(http, seed)
        await mixture.run(requests)
        return (await count_tokens(http, operations)).since(before), mixture.ends
