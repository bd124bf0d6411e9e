"""What a session costs late equals what it costs early: the work of an eviction, and the state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvrecall.domain.episodes import ActiveEpisode, EpisodeSegment
from workers import methods
from workers.engine.session import ResidentSession

EVICTING = sorted(name for name, method in methods.METHODS.items() if method.evicts)
LATE = 1_000_000


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor, in elements, that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


@contextmanager
def begun_at(worker: Any, name: str, start: int, **spec: Any) -> Iterator[ResidentSession]:
    """A session whose rows begin at position `start`, as if all before them had been evicted."""
    worker.open(name, budget=60, layer_budgets="uniform", **spec)
    session = worker.engine.session(name)
    session.length = start
    session.stored = False
    if session.config.method.has_episodes:
        segments = (EpisodeSegment(start, start + 40, 1.0),)
        session.episode = ActiveEpisode("e_1", (5, 6, 7), segments)
    yield worker.engine.swap_in(session)
    worker.engine.discard(session)


@pytest.mark.parametrize("method", EVICTING)
def test_an_eviction_allocates_no_more_late_in_a_session(
    method: str, make_worker: Callable[..., Any]
) -> None:
    worker = make_worker(block_tokens=32, prompt_tokens=32, recent=8, slots=1)
    largest = {}
    for start in (0, LATE):
        tokens = torch.randint(10, 1200, (8, 1, 32), generator=torch.Generator().manual_seed(1))
        with begun_at(worker, f"{method}-{start}", start, method=method) as resident:
            for block in tokens:
                worker.engine.forward([resident], block)
                with LargestTensor() as seen:
                    worker.engine.evict(resident)
                    worker.engine.memory(resident.session)
            largest[start] = seen.elements
    assert 0 < largest[LATE] <= largest[0]


@pytest.mark.parametrize("method", ["snapkv", "chunkkv"])
def test_an_eviction_keeps_the_same_rows_late_in_a_session(
    method: str, make_worker: Callable[..., Any]
) -> None:
    """RoPE is relative: the same tokens, later by a multiple of the chunk, are kept alike."""
    worker = make_worker(block_tokens=32, recent=8, slots=1, sinks=0)
    kept = {}
    for start in (0, 200):
        tokens = torch.randint(10, 1200, (4, 1, 32), generator=torch.Generator().manual_seed(1))
        with begun_at(worker, f"s-{start}", start, method=method) as resident:
            for block in tokens:
                worker.engine.forward([resident], block)
                worker.engine.evict(resident)
            layers = [worker.engine.cache.read(resident.slot, layer) for layer in range(2)]
            kept[start] = [(rows.positions - start).tolist() for rows in layers]
    assert kept[0] == kept[200]


@pytest.mark.parametrize("method", ["snapkv", "epicache"])
def test_the_committed_state_has_the_same_size_at_16000_tokens_as_at_1000(
    method: str, make_worker: Callable[..., Any]
) -> None:
    worker = make_worker(block_tokens=250, slots=1, max_budget=256)
    worker.open(budget=200, method=method, layer_budgets="uniform")
    resident = worker.engine.swap_in(worker.engine.session("s"))
    resident.session.stored = False
    generator = torch.Generator().manual_seed(2)
    size = {}
    for length in range(250, 16_001, 250):
        worker.engine.forward([resident], torch.randint(10, 1200, (1, 250), generator=generator))
        worker.engine.evict(resident)
        size[length] = len(worker.engine.snapshot(resident.session).SerializeToString())
    budget_bytes = 200 * 8  # of eviction scores; the selection is as large from the first turn on
    assert size[16_000] <= size[1_000] + 16
    assert size[16_000] <= size[250] + budget_bytes + 256
    assert len(resident.session.eviction_scores.tokens) == 200
