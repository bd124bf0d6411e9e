"""Compressed bodies: each encoding, in pieces, never over the limit, and what is refused."""

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from backports import zstd

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
    "identity": bytes,
}
PATH = "/v1/chat/completions"


def body_of(api: Any, text: str = "hello there") -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": api.service.info.model, "messages": messages}).encode()


async def post(api: Any, content: Any, encoding: str) -> Any:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return await api.http.post(PATH, content=content, headers=headers)


async def in_pieces(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), 7):
        yield content[at : at + 7]


@pytest.mark.parametrize("encoding", COMPRESSIONS)
@pytest.mark.parametrize("split", [False, True])
async def test_a_compressed_body_is_read(api: Any, encoding: str, split: bool) -> None:
    content = COMPRESSIONS[encoding](body_of(api))
    response = await post(api, in_pieces(content) if split else content, encoding)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
async def test_a_body_that_inflates_over_the_limit_is_refused(api: Any, encoding: str) -> None:
    content = COMPRESSIONS[encoding](body_of(api, "a" * 50_000_000))
    response = await post(api, content, encoding)
    assert response.status_code == 413
    assert "10000 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("damage", ["cut", "other", "more"])
async def test_a_damaged_body_is_refused(api: Any, encoding: str, damage: str) -> None:
    whole = COMPRESSIONS[encoding](body_of(api))
    content = {"cut": whole[:-3], "other": body_of(api), "more": whole + b"{}"}[damage]
    response = await post(api, in_pieces(content), encoding)
    assert response.status_code == 400
    assert "is not compressed as its content-encoding says" in response.json()["error"]["message"]


async def test_an_unknown_encoding_is_refused_with_those_that_are_known(api: Any) -> None:
    response = await post(api, body_of(api), "br")
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert "'br' is not supported" in response.json()["error"]["message"]
