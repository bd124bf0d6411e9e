"""A pool of two scripted workers."""

from collections.abc import AsyncIterator

import pytest

from services.cluster.pool import WorkerPool
from tests.services.cluster.cluster import WAY, Cluster, serving


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    for name, servicer in made.servicers.items():
        made.known.add(name, await made.servers[name].enter_async_context(serving(servicer)))
    made.pool = await WorkerPool.start(made.known, WAY)
    try:
        yield made
    finally:
        await made.pool.close()
        for server in made.servers.values():
            await server.aclose()
