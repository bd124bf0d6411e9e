"""A flood: clients of one tenant that send long prompts without pause.

`python -m benchmarks.fair_shares.flood ADDRESS CLIENTS`, in a process of its own, until it is killed.
"""

import asyncio
import os
import sys

import httpx

MODEL = "served"
TENANT = {"X-Kvrecall-Tenant": "mallory"}
_PROMPT = "The quick brown fox jumps over the lazy dog. " * 100
_PAUSE_SECONDS = 0.5


def main() -> None:
    """Flood the address that the command line names."""
    _, url, clients = sys.argv
    os.nice(19)  # clients on other machines take no time of the server's
    asyncio.run(flood(url, int(clients)))


async def flood(url: str, clients: int) -> None:
    """Send from so many clients, without end."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits, headers=TENANT) as http,
        asyncio.TaskGroup() as group,
    ):
        for client in range(clients):
            group.create_task(_send_all(http, client))


async def send(http: httpx.AsyncClient, client: int, number: int) -> bool:
    """Send one long prompt and wait for the answer; False if it was refused or never came."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{client} {number} {_PROMPT}"}],
        "max_tokens": 256,
    }
    try:
        response = await http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError:
        return False
    return response.status_code == httpx.codes.OK


async def _send_all(http: httpx.AsyncClient, client: int) -> None:
    number = 0
    while True:
        number += 1
        if not await send(http, client, number):
            await asyncio.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    main()
