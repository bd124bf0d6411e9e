"""With the operator's keys nothing that was said is on a disk or in Redis, and everything goes on."""

import base64
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvrecall.client import KvrecallClient
from kvrecall_server.app.errors import ServerNotReady
from kvstore.format.page import HEADER_BYTES, MAGIC, PageHeader, parse_header

Json = dict[str, Any]
WORDS = ("quokka", "zeppelin", "marzipan")
ASKED = "What is the password of Ann?"


def make_key(name: str) -> str:
    """A line of a file of keys."""
    return f"{name} {base64.b64encode(secrets.token_bytes(32)).decode()}\n"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with a key."""
    file = tmp_path / "keys"
    file.write_text(make_key("first"), "utf-8")
    return file


def talk(client: KvrecallClient, say: Any) -> tuple[str, str]:
    """Say the words in messages, calls, results and settings; returns the session and its next answer."""
    tools = [{"type": "function", "function": {"name": f"find_{WORDS[0]}", "parameters": {}}}]
    session = client.create_session(budget=128, tools=tools, metadata={"for": WORDS[0]}).id
    for number, word in enumerate(WORDS):
        text = f"The password of Ann is {word} comet. {say.chatter(7, 12)}"
        client.turn(session, [say.user(text)], max_tokens=6, key=f"key-{number}")
    client.turn(session, [say.user("Look."), say.asks("c1", word=WORDS[1])], generate=False)
    client.event(session, "tool_call.delta", "c1", delta=WORDS[2], index=0)
    client.event(session, "tool_call.completed", "c1", result=f"It is {WORDS[2]}.")
    client.turn(session, [], max_tokens=6, wait_for_repairs=True)
    return session, ask(client, client.fork(session).id, say)


def ask(client: KvrecallClient, session: str, say: Any) -> str:
    """Ask for what was said, and return the answer."""
    return client.turn(session, [say.user(ASKED)], max_tokens=8).text


def find_words(content: bytes) -> list[str]:
    """Words of the talk that are in some bytes."""
    return [word for word in (*WORDS, "comet", "password") if word.encode() in content.lower()]


def list_pages(content: bytes) -> Iterator[PageHeader]:
    """Headers of the pages in the bytes of a segment file or of a value."""
    at = content.find(MAGIC)
    while at >= 0:
        header = parse_header(content, at)
        if header.payload_bytes:
            yield header
        at = content.find(MAGIC, at + HEADER_BYTES + header.payload_bytes)


def read_values(url: str, namespace: str) -> Iterator[tuple[str, bytes]]:
    """All keys of a namespace, with what is stored there."""
    with redis.Redis.from_url(url) as client:
        readers = {
            b"string": lambda key: [client.get(key)],
            b"hash": lambda key: [part for pair in client.hgetall(key).items() for part in pair],
            b"list": lambda key: client.lrange(key, 0, -1),
            b"set": client.smembers,
            b"zset": lambda key: client.zrange(key, 0, -1),
            b"stream": lambda key: [repr(client.xrange(key)).encode()],
        }
        for key in client.scan_iter(f"*{namespace}*"):
            for value in readers[client.type(key)](key):
                yield key.decode(errors="replace"), key + b" " + (value or b"")


def test_files_have_nothing_of_it_and_a_restart_changes_no_answer(
    new_server: Callable[..., Any], keys: Path, say: Any
) -> None:
    server = new_server(KVRECALL_ENCRYPTION__KEYS_FILE=str(keys))
    server.start()
    session, expected = talk(server.own, say)
    say.until(lambda: say.is_idle(server.own, session), "a pause")
    for file in server.data.rglob("*"):  # also what is in the log of SQLite alone
        assert not (file.is_file() and find_words(file.read_bytes())), file
    server.kill()
    pages = [
        header
        for file in server.data.rglob("segment-*.kv")
        for header in list_pages(file.read_bytes())
    ]
    assert len(pages) > 5
    assert all(header.is_encrypted for header in pages)
    server.start()
    assert ask(server.own, session, say) == expected
    assert server.metric("kvrecall_worker_rebuilt_pages_total") == 0
    assert server.stop() == 0


def test_redis_has_nothing_of_it_and_another_worker_goes_on(
    new_cluster: Callable[..., Any], keys: Path, say: Any
) -> None:
    cluster = new_cluster(KVRECALL_ENCRYPTION__KEYS_FILE=str(keys))
    cluster.start()
    session, expected = talk(cluster.own, say)
    say.until(lambda: say.is_idle(cluster.own, session), "a pause")
    url = cluster.environment["KVRECALL_CATALOG_URL"]
    pages = 0
    for key, value in read_values(url, cluster.environment["KVRECALL_STORE__REDIS_NAMESPACE"]):
        assert not find_words(value), key
        for header in list_pages(value):
            assert header.is_encrypted, key
            pages += 1
    assert pages > 5
    cluster.owner(session).end(signal.SIGKILL)
    assert ask(cluster.own, session, say) == expected
    assert cluster.metric("kvrecall_worker_rebuilt_pages_total") == 0
    cluster.kill()


def test_keys_are_changed_at_a_start_and_are_needed_ever_after(
    new_server: Callable[..., Any], keys: Path, say: Any
) -> None:
    server = new_server(KVRECALL_ENCRYPTION__KEYS_FILE=str(keys))
    server.start()
    session, expected = talk(server.own, say)
    server.stop()
    second = make_key("second")
    keys.write_text(second + keys.read_text("utf-8"), "utf-8")
    server.start()
    server.stop()
    keys.write_text(second, "utf-8")
    server.start()
    assert ask(server.own, session, say) == expected
    server.stop()
    keys.write_text(make_key("second"), "utf-8")
    with pytest.raises(ServerNotReady, match="second"):
        server.start()
