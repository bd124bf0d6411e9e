"""Work that a client chooses ends early, away from everybody else's."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psutil
import pytest

from tests.adversary.conftest import QUESTION, Tenant, text_of
from tests.end_to_end.servers import Cluster, until

MIB = 1 << 20


def bomb(patterns: int, first: str) -> dict[str, Any]:
    """A form of 23 bytes a pattern whose compilation doubles in time and memory with each.

    The patterns are of the letters from `first` on.
    """
    letters = (chr(ord(first) + n) for n in range(patterns))
    schema = {"type": "string", "allOf": [{"pattern": f".*{letter}.*"} for letter in letters]}
    return {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": schema},
    }


@pytest.mark.parametrize("patterns", [18, 20, 24])
def test_a_form_that_takes_minutes_to_compile_is_refused(
    mallory: Tenant, cluster: Cluster, patterns: int
) -> None:
    assert cluster.process is not None
    gateway = psutil.Process(cluster.process.pid)
    before = gateway.memory_info().rss
    reply = mallory.chat("x", response_format=bomb(patterns, "a"))
    assert reply.status_code == 400, reply.text
    assert "Traceback" not in reply.text
    assert "backtrace" not in reply.text
    assert gateway.memory_info().rss - before < 64 * MIB


def test_others_are_answered_beside_eight_of_them(mallory: Tenant, ann: Tenant, alone: str) -> None:
    """Different ones, of other letters than above: none is refused by what is known of another."""
    with ThreadPoolExecutor(8) as threads:
        bombs = [
            threads.submit(mallory.chat, "x", response_format=bomb(17 + n, "A")) for n in range(8)
        ]
        answers = 0
        while not all(each.done() for each in bombs):
            assert text_of(ann.chat(QUESTION)) == alone
            answers += 1
        assert answers > 0
        assert {each.result().status_code for each in bombs} <= {200, 400, 429}


def test_many_large_tools_are_served(mallory: Tenant) -> None:
    """Nothing about them is strict, so an answer that may call them needs no grammar of them all."""
    properties = {f"p{n}": {"type": "string"} for n in range(600)}
    parameters = {"type": "object", "properties": properties}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": parameters}}
        for n in range(30)
    ]
    reply = mallory.chat("x", tools=tools, max_tokens=2)
    # The prompt of so many may be longer than this model's context.
    assert reply.status_code in (200, 400), reply.text
    assert "panic" not in reply.text
    if reply.status_code == 400:
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_a_large_body_of_an_unknown_model_keeps_nobody_waiting(
    mallory: Tenant, ann: Tenant
) -> None:
    """The gateway answers probes in between: as many as there are bodies, or more.

    So it does not keep everything else until it has received and refused them all. A parser takes
    milliseconds for one: that it runs on a thread is tested in `tests/gateway/http/bodies/test_parsing.py`.
    """
    text = "x" * 100
    messages = [{"role": "user", "content": text} for _ in range(4000)] * 6
    body = {"model": "none", "messages": messages[:20_000]}
    with ThreadPoolExecutor(4) as threads:
        bodies = [
            threads.submit(mallory.http.post, "/v1/chat/completions", json=body) for _ in range(4)
        ]
        probes = 0
        while not all(each.done() for each in bodies):
            assert ann.http.get("/healthz").status_code == 200
            probes += 1
        assert {each.result().status_code for each in bodies} <= {400, 404, 413, 422, 429}
    assert probes >= 4


def test_work_of_clients_that_left_ends(mallory: Tenant, ann: Tenant, cluster: Cluster) -> None:
    """Their turns leave the worker within some steps, of the 12,000 tokens that they asked for."""
    body = {
        "model": mallory.model,
        "messages": [{"role": "user", "content": "the garden and the house " * 40}],
        "max_tokens": 2000,
        "stream": True,
        "logit_bias": {},
    }
    decoded = partial(cluster.metric, "kvrecall_computed_tokens_total", kind="decoded")
    before = decoded()
    for _ in range(6):
        with mallory.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = filter(None, reply.iter_lines())
            assert [next(lines)[:6] for _ in range(4)] == ["data: "] * 4
    until(
        lambda: cluster.metric("kvrecall_turns_running") == 0,
        "no turn runs",
        lambda: cluster.metric("kvrecall_turns_running"),
    )
    until(lambda: decoded() > before, "their tokens are metered", decoded)
    assert decoded() - before < 600
    assert text_of(ann.chat("Is anybody here?"))
