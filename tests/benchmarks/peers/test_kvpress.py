"""Each method that kvpress has keeps the rows that kvpress keeps on the same input.

`benchmarks/peers/README.md` lists the settings, and the cases in which the two cannot be equal.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.ram import RamTier
from reference import MODEL_PATH
from workers.cache.active_cache import EMPTY
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import load_tokenizer

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "kvpress.json").read_text())
# KVzip's prompt before the repeated context in kvpress, under the packaged model's template.
REPEAT = "\n\nRepeat the previous context exactly.<|end|><|assistant|>"
# Positions per layer and head.
Rows = list[list[set[int]]]


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    """The packaged model, as it is served."""
    return load_model(MODEL_PATH, dtype=torch.float32, device="cpu")


@pytest.fixture
def make_engine(model: LoadedModel) -> Iterator[Callable[..., Engine]]:
    """Factory of engines that protect only `sinks` rows and take every input as one block."""
    made: list[Engine] = []

    def make(sinks: int = 0) -> Engine:
        shape = model.shape
        layout = PageLayout(
            shape.n_layers, shape.n_kv_heads, shape.head_dim, model.dtype, model.fingerprint
        )
        settings = WorkerSettings(
            slots=1,
            max_budget=256,
            block_tokens=1024,
            prompt_tokens=1024,
            sinks=sinks,
            recent=0,
            turn_share=0,
        )
        tokenizer = load_tokenizer(MODEL_PATH, model.eos_token_ids)
        made.append(Engine(Parts(model, tokenizer, RowStore(layout, [RamTier(1 << 28)]), settings)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        engine.store.close()


def _positions(text: str) -> set[int]:
    """Parse ranges such as 0-3,7 into positions."""
    runs = [[int(end) for end in run.split("-")] for run in text.split(",") if run]
    return {position for run in runs for position in range(run[0], run[-1] + 1)}


def _theirs(case: dict[str, Any], what: str = "kept") -> Rows:
    return [[_positions(head[what]) for head in layer] for layer in case["layers"]]


def _ours(
    engine: Engine, case: dict[str, Any], budget: int, *, repeat_from: int = 0, **settings: Any
) -> Rows:
    """Rows of a session after the input was prefilled in one block and evicted from.

    A method that repeats the block does so from token `repeat_from` on.
    """
    spec = pb.SessionSpec(
        session="s",
        epoch=1,
        budget=budget,
        method=case["method"],
        method_settings=json.dumps({**case["settings"], **settings}),
    )
    session = engine.open(spec, pb.SessionState())
    resident = engine.swap_in(session)
    engine.forward([resident], torch.tensor([FIXTURE["inputs"][case["input"]]]))
    session.block = session.block[repeat_from:]
    engine.evict(resident)
    engine.swap_out(session)
    assert session.selection is not None, "a session without a slot has a selection"
    return [
        [set(head[head != EMPTY].tolist()) for head in layer]
        for layer in session.selection.positions
    ]


def _cases(*names: str) -> list[Any]:
    cases = [case for case in FIXTURE["cases"] if case["method"] in names]
    assert len(cases) == 3 * len(names), "three inputs each"
    return [pytest.param(case, id=f"{case['method']}-{case['input']}") for case in cases]


def _counts(rows: Rows) -> list[list[int]]:
    return [[len(head) for head in layer] for layer in rows]


def _assert_same_but_for_ties(ours: Rows, theirs: Rows, near: Rows) -> None:
    """Assert equal rows, except that rows with equal scores up to rounding are interchangeable."""
    assert _counts(ours) == _counts(theirs)
    for our_heads, their_heads, near_heads in zip(ours, theirs, near, strict=True):
        for our, their, tied in zip(our_heads, their_heads, near_heads, strict=True):
            assert our ^ their <= tied


@pytest.mark.parametrize(
    "case", _cases("streaming_llm", "h2o", "snapkv", "adakv", "keydiff", "chunkkv", "tova", "knorm")
)
def test_the_same_rows_are_kept(case: dict[str, Any], make_engine: Callable[..., Engine]) -> None:
    theirs = _theirs(case)
    budget = sum(len(head) for head in theirs[0]) // len(theirs[0])
    _assert_same_but_for_ties(_ours(make_engine(), case, budget), theirs, _theirs(case, "near"))


@pytest.mark.parametrize("case", _cases("pyramidkv"))
def test_a_pyramid_of_layers_keeps_the_same_rows_but_for_rounding(
    case: dict[str, Any], make_engine: Callable[..., Engine]
) -> None:
    """Ours sums to the budget exactly; theirs rounds every layer, to at most a row more or less."""
    ours = _ours(make_engine(), case, case["budget"])
    theirs = _theirs(case)
    near = _theirs(case, "near")
    for our_heads, their_heads, near_heads in zip(ours, theirs, near, strict=True):
        for our, their, tied in zip(our_heads, their_heads, near_heads, strict=True):
            assert abs(len(our) - len(their)) <= 1
            smaller, larger = sorted((our, their), key=len)
            assert smaller - larger <= tied


@pytest.mark.parametrize("case", _cases("kvzip"))
def test_kvzip_keeps_the_same_rows_when_it_repeats_the_same_tokens(
    case: dict[str, Any], make_engine: Callable[..., Engine]
) -> None:
    """In kvpress the first token counts as part of the chat template and is not repeated."""
    ours = _ours(make_engine(sinks=4), case, case["budget"], repeat_from=1, prompt=REPEAT)
    _assert_same_but_for_ties(ours, _theirs(case), _theirs(case, "near"))
