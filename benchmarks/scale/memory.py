"""Memory of Python objects, as tracemalloc counts it: apart from tensors, and without noise."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Trace allocations; yields a function for the bytes allocated since then and still in use."""
    tracemalloc.start()
    try:
        yield _traced_bytes
    finally:
        tracemalloc.stop()


def _traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
