"""The vendors' own clients."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI


@pytest.fixture
def openai(api: Any) -> AsyncOpenAI:
    base = "http://kvrecall/v1"
    return AsyncOpenAI(base_url=base, api_key="any", max_retries=0, http_client=api.http)


@pytest.fixture
async def anthropic(served: Any) -> AsyncIterator[AsyncAnthropic]:
    base = str(served.http.base_url)
    async with AsyncAnthropic(base_url=base, api_key="any", max_retries=0) as client:
        yield client
