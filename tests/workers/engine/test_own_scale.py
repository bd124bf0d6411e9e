"""Rows that a session keeps of a model with an attention scale of its own are those that its attention says.

Methods score recorded queries in the scale of `head_dim ** -0.5`, so the queries are rescaled. What is
compared with is the attention that transformers' own pass computes.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import MODEL_PATH
from tests.workers.model.architectures.family import PROMPT, Family
from tests.workers.model.architectures.full_attention import DENSE
from workers.cache.active_cache import EMPTY
from workers.engine.settings import WorkerSettings
from workers.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET = 96
SINKS = 4
RECENT = 8
# The whole prompt is one block, so that rows are chosen once, by attention to all rows.
SETTINGS = WorkerSettings(
    slots=1, max_budget=128, block_tokens=512, sinks=SINKS, recent=RECENT, turn_share=0.0
)
USUAL = 16**-0.5
"""Of heads of 16 numbers, where a model has no scale of its own."""


def score_tova(attention: Tensor) -> Tensor:
    """Score rows by the last query's mean attention over all heads, `[n_kv_heads, t]`."""
    return attention[:, :, -1].mean((0, 1)).expand(len(attention), -1)


def score_snapkv(attention: Tensor) -> Tensor:
    """Score rows by the mean attention of each KV head's queries, of the last `RECENT` tokens."""
    return attention[:, :, -RECENT:].mean((1, 2))


def score_h2o(attention: Tensor) -> Tensor:
    """Score rows by the attention of all queries, mean over a KV head's group."""
    return attention.mean(1).sum(1)


METHODS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "tova": (score_tova, "{}"),
    "snapkv": (score_snapkv, f'{{"window": {RECENT}, "pool": 1}}'),
    "h2o": (score_h2o, '{"recent": 0}'),
}


@pytest.fixture(params=[0.05, 0.6], scope="module")
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    """A Granite whose scale is smaller, or larger, than the usual one."""
    granite = DENSE["granite"]
    scaled = replace(granite, settings={**granite.settings, "attention_multiplier": request.param})
    folder = tmp_path_factory.mktemp("rows")
    made = Family(scaled, load_tokenizer(MODEL_PATH, (1,)), folder, SETTINGS)
    yield made
    made.close()


@pytest.mark.parametrize("method", list(METHODS))
def test_the_rows_that_stay_are_the_best_at_the_models_own_scale(
    method: str, family: Family
) -> None:
    score, settings = METHODS[method]
    family.open(method, BUDGET, method=method, method_settings=settings)
    done = family.turn(method, PROMPT, generate=False)
    engine = family.worker.engine
    resident = engine.resident(method)
    length = resident.session.length
    scale: float = family.plain.config.attention_multiplier
    unlike = 0
    for layer, attention in enumerate(attend(family, list(done.token_ids))):
        expected = [choose(each, length) for each in score(attention)]
        rows = engine.cache.read(resident.slot, layer).positions
        assert [{*each.tolist()} - {EMPTY} for each in rows] == expected
        usual = (attention.log() * (USUAL / scale)).softmax(-1)
        unlike += [choose(each, length) for each in score(usual)] != expected
    assert unlike, "at the usual scale other rows would stay"


@torch.inference_mode()
def attend(family: Family, tokens: list[int]) -> list[Tensor]:
    """Compute attention by transformers' pass, per layer `[n_kv_heads, group, t, t]`."""
    model: Any = family.plain
    model.set_attn_implementation("eager")
    out = model(input_ids=torch.tensor([tokens]), use_cache=False, output_attentions=True)
    heads = model.config.num_key_value_heads
    return [each[0].unflatten(0, (heads, -1)) for each in out.attentions]


def choose(scores: Tensor, length: int) -> set[int]:
    """Choose a head's rows: the first, the newest, and the best of the others; those before `length` stay.

    A turn that ends drops its tokens behind the last whole page, to be computed again.
    """
    tokens = len(scores)
    best = scores[SINKS : tokens - RECENT].topk(BUDGET - SINKS - RECENT).indices + SINKS
    always = {*range(SINKS), *range(tokens - RECENT, tokens)}
    return {each for each in always | set(best.tolist()) if each < length}
