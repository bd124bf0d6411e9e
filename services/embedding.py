"""Vectors of texts, by the sentence encoder of a worker."""

import asyncio
from collections.abc import Sequence

from kvrecall.domain.episodes import Vectors, vectors_from_bytes
from kvrecall.domain.errors import EmbeddingRefused
from services.cluster.worker_client import Worker


async def embed_texts(worker: Worker, texts: Sequence[str]) -> Vectors:
    """Embed texts as unit vectors, float32 `[n, dimensions]`.

    Raises EmbeddingRefused for another number of vectors, WorkerRefused, WorkerLost.
    """
    result = await worker.embed(list(texts))
    vectors = vectors_from_bytes(result.vectors, result.dimensions)
    if len(vectors) != len(texts):
        raise EmbeddingRefused(f"the encoder gave {len(vectors)} vectors for {len(texts)} texts")
    return vectors


async def embed_query(worker: Worker, text: str, seconds: float) -> Vectors:
    """Embed the text of a turn, which waits so many seconds at most, float32 `[dimensions]`.

    Raises as `embed_texts`, EmbeddingRefused also for an encoder that takes longer.
    """
    try:
        async with asyncio.timeout(seconds):
            vectors = await embed_texts(worker, [text])
    except TimeoutError as error:
        raise EmbeddingRefused(f"the encoder took more than {seconds:g} seconds") from error
    vector: Vectors = vectors[0]
    return vector
