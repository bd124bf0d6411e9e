"""A gateway and two workers on one Redis that two tenants share: Mallory attacks, Ann only works.

After every test the workers are those of before, and Ann gets the answers that she got alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest

from reference import MODEL_PATH
from tests.end_to_end.servers import DEADLINE_SECONDS, Cluster, until

QUESTION = "Please note that the extension list says Melnor K4821. What does it say?"


@dataclass
class Tenant:
    """A tenant with a key of its own, as clients of OpenAI's API see the service."""

    name: str
    http: httpx.Client
    model: str

    def chat(self, content: str, **body: Any) -> httpx.Response:
        """Ask one greedy question of a chat of its own."""
        return self.ask([{"role": "user", "content": content}], **body)

    def ask(self, messages: list[dict[str, Any]], **body: Any) -> httpx.Response:
        """Answer a history greedily, by default with at most 8 tokens."""
        sampling = {"max_tokens": 8, "temperature": 0}
        sent = {"model": self.model, "messages": messages, **sampling, **body}
        return self.http.post("/v1/chat/completions", json=sent)

    def sessions(self) -> list[str]:
        """The ids of its sessions, at most 100."""
        found = self.http.get("/v1/sessions", params={"limit": 100}).raise_for_status()
        return [each["id"] for each in found.json()["sessions"]]


def text_of(reply: httpx.Response) -> str:
    """The text of a chat completion that has to have succeeded."""
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Cluster]:
    """The service: the reference model, defaults of all limits."""
    cluster = Cluster(
        tmp_path_factory.mktemp("adversary"),
        {
            "KVRECALL_MODEL": str(MODEL_PATH),
            "KVRECALL_CATALOG_URL": redis_url,
            "KVRECALL_STORE__REDIS_URL": redis_url,
            "KVRECALL_STORE__REDIS_NAMESPACE": uuid4().hex,
            "KVRECALL_ACCESS__PEPPER": "a pepper of these tests",
        },
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture(scope="session")
def tenants(cluster: Cluster) -> Iterator[dict[str, Tenant]]:
    """Mallory and Ann, each with a key."""
    keys = {name: cluster.run_keys("create", "--tenant", name) for name in ("mallory", "ann")}
    operator = cluster.run_keys("create", "--tenant", "operator", "--scope", "admin")
    cluster.http.headers["Authorization"] = f"Bearer {operator}"
    until(lambda: httpx.get(f"{cluster.url}/v1/models").status_code == 401, "keys are needed")
    made = {}
    for name, key in keys.items():
        headers = {"Authorization": f"Bearer {key}"}
        http = httpx.Client(base_url=cluster.url, timeout=DEADLINE_SECONDS, headers=headers)
        model = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        made[name] = Tenant(name, http, model)
    yield made
    for tenant in made.values():
        tenant.http.close()


@pytest.fixture(scope="session")
def alone(tenants: dict[str, Tenant]) -> str:
    """Ann's answer before anything was attacked."""
    return text_of(tenants["ann"].chat(QUESTION))


@pytest.fixture
def mallory(tenants: dict[str, Tenant]) -> Tenant:
    """The tenant that attacks."""
    return tenants["mallory"]


@pytest.fixture
def ann(tenants: dict[str, Tenant]) -> Tenant:
    """The tenant beside it."""
    return tenants["ann"]


@pytest.fixture(autouse=True)
def unharmed(cluster: Cluster, ann: Tenant, alone: str) -> Iterator[None]:
    """Check after a test that no worker was lost and that Ann's answer is what it was."""
    pids = [process.running.pid for process in cluster.of_name.values() if process.running]
    yield
    for process in cluster.of_name.values():
        assert process.running is not None
        assert process.running.poll() is None, "a worker ended"
    assert [process.running.pid for process in cluster.of_name.values() if process.running] == pids
    assert cluster.metric("kvrecall_worker_up") == cluster.workers
    assert cluster.metric("kvrecall_turn_retries_total") == 0, "a turn was taken to another worker"
    assert text_of(ann.chat(QUESTION)) == alone
