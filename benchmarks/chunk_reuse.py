"""Savings of ChunkKV's index reuse: seconds of selection with one and two layers a group.

`python -m benchmarks.chunk_reuse` measures the packaged model and one with 28 layers whose
attention has the shape of a 3 B Llama (24 query and 8 KV heads of 128). The other parts of that one
are small and random: selection does not depend on them. Two sessions get the same blocks in
rotation, one with `reuse` 1, one with 2, in one process, so that disturbances of the machine affect
both. The result file goes to `benchmarks/results/`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.throughput import RESULTS, describe, speed_rows
from kvrecall.app.wiring import build_store
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.reporting.results import Row, build_results
from reference import MODEL_PATH
from reference.conversation import generate
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.methods import LayerRows, Method
from workers.methods.chunkkv import ChunkKV
from workers.model.loader import LoadedModel, adopt, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer
from workers.primitives.observation import Observation

LAYERS_IN_A_GROUP = (1, 2)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement: `blocks` blocks of `block` tokens under `budget` rows."""

    seed: int
    blocks: int
    block: int
    budget: int


@dataclass
class Spent:
    """Seconds of each eviction of one session, and the number of layers scored."""

    selecting: list[float] = field(default_factory=list)
    evicting: list[float] = field(default_factory=list)
    scored_layers: int = 0


@dataclass(frozen=True)
class TimedMethod(Method):
    """A method that records the seconds of its scores and selections."""

    inner: Method
    spent: Spent

    name: ClassVar[str] = "timed"

    @property
    def observation(self) -> Observation:
        """Observation of the inner method."""
        return self.inner.observation

    @property
    def shares_layers(self) -> int:
        """Layers a group of the inner method."""
        return self.inner.shares_layers

    def scores(self, rows: LayerRows) -> Tensor:
        """Scores of the inner method, timed."""
        self.spent.scored_layers += 1
        return self._timed(lambda: self.inner.scores(rows))

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Selection of the inner method, timed."""
        return self._timed(lambda: self.inner.select(scores, positions, budget))

    def _timed(self, work: Callable[[], _T]) -> _T:
        seconds, done = timed(work)
        self.spent.selecting[-1] += seconds
        return done


def main() -> None:
    """Read the command line, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--blocks", type=int, default=96, help="of the reference model; half as many of the other"
    )
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/chunk-reuse-<device>.json"
    )
    given = parser.parse_args()
    reference = load_model(MODEL_PATH)
    tokenizer = load_tokenizer(MODEL_PATH, reference.eos_token_ids)
    subjects = [
        ("reference model, 5 layers", reference, Plan(given.seed, given.blocks, 128, 256)),
        (
            "28 layers",
            deep_model(len(tokenizer.inner), given.seed),
            Plan(given.seed, given.blocks // 2, 128, 512),
        ),
    ]
    rows = [row for name, model, plan in subjects for row in measure(name, model, tokenizer, plan)]
    for row in rows:
        print(describe(row), flush=True)
    out = given.out or RESULTS / f"chunk-reuse-{reference.device.type}.json"
    build_results(
        "chunk reuse", given.seed, "reference; 28 layers of 24 query and 8 KV heads of 128", rows
    ).write(out)


def deep_model(vocabulary: int, seed: int) -> LoadedModel:
    """A model of 28 layers with the attention of a 3 B Llama, narrow and random in all else."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return adopt(LlamaForCausalLM(config))


def measure(name: str, model: LoadedModel, tokenizer: ChatTokenizer, plan: Plan) -> list[Row]:
    """Rows of one model: seconds per eviction of selecting and in total, and layers scored.

    The ratio of the medians is reported with the median of the ratios at each block: two
    consecutive evictions have the same conditions.
    """
    spent = evictions(model, tokenizer, plan)
    labels = {reuse: f"chunkkv, reuse {reuse}" for reuse in spent}
    condition = f"{name}, budget {plan.budget}, block {plan.block}"
    rows: list[Row] = []
    for metric in ("selecting", "evicting"):
        seconds = {label: getattr(spent[reuse], metric) for reuse, label in labels.items()}
        rows += speed_rows(condition, metric, "seconds per eviction", seconds, labels[1])
        pairs = [
            with_reuse / without for without, with_reuse in zip(*seconds.values(), strict=True)
        ]
        rows += speed_rows(
            condition,
            f"{metric} at the same block",
            f"of {labels[1]}",
            {labels[2]: pairs},
            labels[2],
        )
    scored = {
        labels[reuse]: [each.scored_layers / len(each.evicting)] for reuse, each in spent.items()
    }
    return [*rows, *speed_rows(condition, "layers scored", "per eviction", scored, labels[1])]


def evictions(model: LoadedModel, tokenizer: ChatTokenizer, plan: Plan) -> dict[int, Spent]:
    """Seconds of the evictions of one session of each kind, on the same text in rotation."""
    spent = {reuse: Spent() for reuse in LAYERS_IN_A_GROUP}
    settings = WorkerSettings(slots=len(spent), max_budget=plan.budget, block_tokens=plan.block)
    blocks = build_blocks(tokenizer, plan)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(build_store(model, Path(folder), 1 << 30)) as store,
    ):
        engine = Engine(Parts(model, tokenizer, store, settings))
        for reuse, clock in spent.items():
            session = engine.open(_spec(reuse, plan), pb.SessionState())
            timed_method = TimedMethod(ChunkKV(reuse=reuse), clock)
            session.config = replace(session.config, method=timed_method)
            engine.swap_in(session)
        for index, block in enumerate(blocks):
            for reuse in _rotated(LAYERS_IN_A_GROUP, index):
                _append(engine, str(reuse), block, spent[reuse], plan)
        engine.close()
    return spent


def build_blocks(tokenizer: ChatTokenizer, plan: Plan) -> Tensor:
    """The first blocks of a generated conversation: int64 `[blocks, 1, block]`."""
    wanted = plan.blocks * plan.block
    messages = generate(plan.seed, wanted + 1000, split="held_out").messages()
    token_ids = [
        token
        for segment in tokenizer.prompt([], messages, [], False)
        for token in segment.token_ids
    ]
    assert len(token_ids) >= wanted, "the conversation is longer than the blocks"
    return torch.tensor(token_ids[:wanted]).view(plan.blocks, 1, plan.block)


def timed(work: Callable[[], _T]) -> tuple[float, _T]:
    """Seconds of `work`, its work on the device included, and its result."""
    _synchronize()
    started = time.perf_counter()
    done = work()
    _synchronize()
    return time.perf_counter() - started, done


def _append(engine: Engine, name: str, block: Tensor, spent: Spent, plan: Plan) -> None:
    session = engine.resident(name)
    engine.forward([session], block)
    spent.selecting.append(0.0)
    seconds, _ = timed(lambda: engine.evict(session))
    if spent.selecting[-1]:
        spent.evicting.append(seconds)
    else:
        spent.selecting.pop()  # within the budget: nothing to select


def _spec(reuse: int, plan: Plan) -> pb.SessionSpec:
    return pb.SessionSpec(
        session=str(reuse), epoch=1, method="chunkkv", budget=plan.budget, seed=plan.seed
    )


def _rotated(order: Sequence[int], by: int) -> list[int]:
    return [*order[by % len(order) :], *order[: by % len(order)]]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
