"""A session that goes back to fewer rows reads those that evictions would have left, on all ranks or on none."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.conftest import LocalWorker
from workers.engine.engine import Parts
from workers.engine.settings import WorkerSettings
from workers.parallel.alone import Alone
from workers.tasks.rewinding import rewind

PAGE = 64


class Beside(Alone):
    """A rank beside another one, which may have other rows active."""

    differs = False

    def some(self, flags: Sequence[bool]) -> list[bool]:
        """Return the flags of both."""
        return [flag or self.differs for flag in flags]


@pytest.mark.parametrize("differs", [False, True])
def test_rows_are_read_where_those_of_another_rank_differ(
    differs: bool,
    loaded: Callable[..., Any],
    tokenizer: Any,
    open_store: Callable[..., Any],
    words: Callable[..., str],
) -> None:
    group = Beside()
    model = replace(loaded("llama"), group=group)
    settings = WorkerSettings(block_tokens=PAGE, recent=8)
    worker = LocalWorker(Parts(model, tokenizer, open_store(model), settings))
    worker.open(method="icecache", budget=1024)
    length = worker.turn("s", words(150), max_tokens=4).state.length
    engine = worker.engine
    before = engine.cache.read(engine.resident("s").slot, 0).positions.clone()
    group.differs = differs
    waits = [each for each in rewind(engine, engine.resident("s"), length - PAGE, []) if each]
    assert len(waits) == differs, "a read of rows, of which there are the same here"
    after = engine.cache.read(engine.resident("s").slot, 0).positions
    assert torch.equal(after, before[:, : length - PAGE])
    worker.close()
