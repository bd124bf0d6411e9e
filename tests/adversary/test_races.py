"""Requests that meet others of the same tenant in the middle are answered, never with a 500."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import sleep
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.adversary.conftest import Tenant

ROUNDS = 12


@pytest.fixture
def threads() -> Any:
    """Threads for requests at once."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def delete_soon(tenant: Tenant, session: str, seconds: float) -> None:
    """Delete a session after so many seconds, and while it answers again until it is gone."""
    sleep(seconds)
    while tenant.http.delete(f"/v1/sessions/{session}").status_code == 409:
        sleep(0.01)


def identity(reply: httpx.Response) -> tuple[str, str]:
    """What a request made, by which its repetitions are known: a session and texts, or an object."""
    body = reply.json()
    if "choices" in body:
        return reply.headers["kvrecall-session"], str(body["choices"])
    return "", body["id"]


def test_a_conversation_goes_on_while_its_session_is_deleted(
    mallory: Tenant, threads: ThreadPoolExecutor
) -> None:
    rng = random.Random(3)
    for _ in range(ROUNDS):
        history = [{"role": "user", "content": f"{uuid4().hex[:6]} hello"}]
        first = mallory.ask(history, max_tokens=3)
        answer = first.json()["choices"][0]["message"]
        deleted = threads.submit(
            delete_soon, mallory, first.headers["kvrecall-session"], rng.uniform(0, 0.03)
        )
        more = [*history, answer, {"role": "user", "content": "more"}]
        reply = mallory.ask(more, max_tokens=3)
        deleted.result()
        assert reply.status_code == 200, reply.text


def test_branches_of_a_conversation_are_answered_while_its_session_is_deleted(
    mallory: Tenant, threads: ThreadPoolExecutor
) -> None:
    for _ in range(3):
        history = [{"role": "user", "content": f"{uuid4().hex[:6]} hello"}]
        first = mallory.ask(history, max_tokens=3)
        history.append(first.json()["choices"][0]["message"])
        branches = [[*history, {"role": "user", "content": f"branch {n}"}] for n in range(4)]
        deleted = threads.submit(delete_soon, mallory, first.headers["kvrecall-session"], 0.01)
        replies = list(threads.map(partial(mallory.ask, max_tokens=3), branches))
        deleted.result()
        assert [each.status_code for each in replies] == [200] * 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": "HISTORY", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": "HISTORY", "max_tokens": 3, "n": 3}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3, "background": True}),
        ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": "x"}]}),
    ],
    ids=["chat", "three choices", "response", "background", "conversation"],
)
def test_a_request_that_is_sent_four_times_under_one_key_is_carried_out_once(
    mallory: Tenant, threads: ThreadPoolExecutor, path: str, body: dict[str, Any]
) -> None:
    key = uuid4().hex
    sent = dict(body) if "conversations" in path else {"model": mallory.model, **body}
    if "messages" in sent:
        sent["messages"] = [{"role": "user", "content": key}]

    def post(_: int) -> httpx.Response:
        return mallory.http.post(path, json=sent, headers={"Idempotency-Key": key})

    replies = list(threads.map(post, range(4)))
    assert [each.status_code for each in replies] == [200] * 4, [each.text for each in replies]
    assert len({identity(each) for each in replies}) == 1
