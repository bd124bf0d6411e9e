"""OpenAI's own client, on the server of a test."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI


@pytest.fixture
def openai(server: Any) -> Iterator[OpenAI]:
    """Client of the server that the test module's fixture `server` starts."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
