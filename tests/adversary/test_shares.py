"""One tenant's flood takes its own share: others find a place and are answered before most of it."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import httpx

from tests.adversary.conftest import Tenant
from tests.end_to_end.servers import DEADLINE_SECONDS

QUESTIONS = 8
CLIENTS = 32
PROMPT = "the garden and the house and the dog and the road " * 60


def test_a_flood_refuses_its_own_tenant_and_serves_the_other(mallory: Tenant, ann: Tenant) -> None:
    """Every short question beside 32 clients with long prompts is answered, and none of it waits for all of them."""
    ends = Event()
    served: list[int] = []

    def flood(number: int) -> None:
        headers = dict(mallory.http.headers)
        with httpx.Client(
            base_url=mallory.http.base_url, headers=headers, timeout=DEADLINE_SECONDS
        ) as http:
            while not ends.is_set():
                body = {
                    "model": mallory.model,
                    "messages": [{"role": "user", "content": f"{number} {len(served)} {PROMPT}"}],
                    "max_tokens": 30,
                }
                reply = http.post("/v1/chat/completions", json=body)
                served.append(reply.status_code)
                if reply.status_code == 429:
                    assert int(reply.headers["retry-after"]) >= 1
                    ends.wait(0.2)

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(flood, number) for number in range(CLIENTS)]
        statuses, beside = [], []
        try:
            while not served:
                ends.wait(0.05)
            for number in range(QUESTIONS):
                before = served.count(200)
                statuses.append(ann.chat(f"question {number}", max_tokens=4).status_code)
                beside.append(served.count(200) - before)
        finally:
            ends.set()
        for each in clients:
            each.result()
    assert statuses == [200] * QUESTIONS
    # First come, first served would answer all that waited before a question: half of the flood or more.
    assert sorted(beside)[QUESTIONS // 2] <= CLIENTS // 4, beside
