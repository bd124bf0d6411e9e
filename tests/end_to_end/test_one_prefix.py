"""A hundred conversations of one agent: what they begin with is in each tier, and in host memory, once."""

from collections.abc import Iterator
from typing import Any

import pytest

CONVERSATIONS = 100
PAGE_TOKENS = 64
PAGE_BYTES = (
    PAGE_TOKENS * 5 * 2 * 2 * 64 * 4
)  # tokens, layers, heads, key and value, width, float32
HEADER_BYTES = 256
# Of a conversation's own: its question and answer.
OWN_PAGES = 3


@pytest.fixture(scope="module")
def server(new_server: Any) -> Iterator[Any]:
    """A server that only this file uses: the metrics count all sessions of a server."""
    own = new_server(KVRECALL_RAM_BYTES=str(256 << 20))
    own.start()
    yield own
    own.kill()


def test_a_hundred_conversations_take_their_beginnings_bytes_once(server: Any, say: Any) -> None:
    client = server.own
    system = {"role": "system", "content": say.chatter(77, 70)}
    lengths, cached = list[int](), list[int]()
    for number in range(CONVERSATIONS):
        session = client.create_session(budget=128, seed=1).id
        question = say.user(say.chatter(1000 + number, 6))
        turn = client.turn(session, [system, question], max_tokens=4)
        lengths.append(turn.memory.length)
        (logged,) = client.inspect.turns(session).turns
        cached.append(turn.usage.prompt_tokens - logged.prefilled_tokens)
    assert turn.memory.evicted_rows, "all rows are active, and none is searched"
    beginning = min(cached[1:])
    assert beginning > 8 * PAGE_TOKENS
    own = sum(length - beginning for length in lengths)
    assert own < CONVERSATIONS * OWN_PAGES * PAGE_TOKENS

    once = beginning // PAGE_TOKENS * PAGE_BYTES
    # In host memory each may have an unfinished page besides.
    pages = (beginning + own) // PAGE_TOKENS + CONVERSATIONS
    most = pages * (PAGE_BYTES + HEADER_BYTES)
    assert most < CONVERSATIONS * once / 4, "the bound tells once from a hundred times"
    for tier in ("ram", "nvme"):
        assert once < server.metric("kvrecall_tier_bytes", tier=tier) <= most
    assert once < server.metric("kvrecall_worker_host_cache_bytes") <= most
