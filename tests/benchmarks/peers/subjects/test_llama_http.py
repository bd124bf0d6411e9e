"""Events of llama.cpp's server."""

import pytest

from benchmarks.peers.errors import PeerFailed
from benchmarks.peers.subjects.llama_http import read_tokens


def test_tokens_are_read_off_the_events_but_for_the_last_one() -> None:
    assert read_tokens('data: {"content": " is", "tokens": [314, 9], "stop": false}') == [314, 9]
    assert read_tokens('data: {"content": "", "tokens": [2], "stop": true}') == []
    assert read_tokens("data: [DONE]") == []
    assert read_tokens("") == []


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(PeerFailed, match="too long"):
        read_tokens('data: {"error": {"message": "the prompt is too long"}}')
