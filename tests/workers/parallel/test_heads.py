"""Selections of several ranks' heads, and sessions that they refuse."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.workers.conftest import build_spec
from tests.workers.parallel.stub_group import StubGroup
from workers.cache.active_cache import EMPTY
from workers.engine.selection import Selection
from workers.engine.selection_heads import join_heads, take_heads
from workers.engine.session_factory import build_config
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings
from workers.model.loader import LoadedModel

POSITIONS = [[0, 1, EMPTY], [0, 2, 5]]
PROMOTED = [[False, True, False], [False, False, True]]
WHOLE = Selection(
    tuple(torch.tensor(POSITIONS, dtype=torch.int32) for _ in range(2)),
    tuple(torch.tensor(PROMOTED) for _ in range(2)),
)


def test_a_rank_takes_its_heads_and_joined_they_are_the_whole_again() -> None:
    parts = [take_heads(WHOLE, StubGroup(rank, 2)) for rank in range(2)]
    assert [part.positions[0].tolist() for part in parts] == [[[0, 1]], [[0, 2, 5]]]
    said = [part.to_bytes() for part in parts]
    for rank, part in enumerate(parts):
        joined = join_heads(part, StubGroup(rank, 2, said))
        assert joined is not None
        assert joined.to_bytes() == WHOLE.to_bytes()


@pytest.mark.parametrize("method", ["adakv", "epicache"])
def test_methods_of_all_heads_are_refused(
    method: str, loaded: Callable[[str], LoadedModel]
) -> None:
    model = loaded("llama")
    spec = build_spec("s", method=method, budget=200)
    build_config(spec, model, WorkerSettings(), (0.1, 0.2))
    with pytest.raises(BadSettings, match="without --tensor-parallel"):
        build_config(spec, replace(model, group=StubGroup(0, 2)), WorkerSettings(), (0.1, 0.2))
