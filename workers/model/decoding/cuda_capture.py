"""Capture of work on a GPU as a CUDA graph."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
# Work runs so often before its capture: Triton compiles, and libraries choose their algorithms, in the first run.
_RUNS_BEFORE = 2
_cuda: Any = torch.cuda  # its streams and graphs are untyped


class CudaCapture:
    """A `workers.model.decoding.captured.Capture` whose graphs have their memory in common: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        """Capture on a GPU."""
        self._stream = _cuda.Stream(device)
        self._pool = _cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Capture `work`, which runs twice before."""
        current = _cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with _cuda.stream(self._stream):
            for _ in range(_RUNS_BEFORE):
                work()
        current.wait_stream(self._stream)
        graph = _cuda.CUDAGraph()
        # Other threads copy rows meanwhile, and allocate pinned memory.
        with _cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            result = work()

        def replay() -> _T:
            graph.replay()
            return result

        return replay
