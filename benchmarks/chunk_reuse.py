"""What layer-wise index reuse saves ChunkKV: seconds of selection with two layers a group, and with one, side by side.

`python benchmarks/chunk_reuse.py` measures the packaged model and one with 28 layers whose attention has the shape of
a 3 B Llama (24 query and 8 KV heads of 128). That one's other parts are small and random: selection does not see them.
Two sessions hear the same blocks in rotation, one with `reuse` 1, one with 2, in one process, so that what disturbs the
machine disturbs both. The result file goes to `benchmarks/results/`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.throughput import RESULTS, describe, speed_rows
from kvrecall.app.wiring import build_store
from kvrecall.protocol.v1 import worker_pb2 as wire
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
    """What is measured: `blocks` blocks of `block` tokens under `budget` rows."""

    seed: int
    blocks: int
    block: int
    budget: int


@dataclass
class Spent:
    """Seconds of the evictions of one session, and how often a layer was scored."""

    selecting: list[float] = field(default_factory=list)
    evicting: list[float] = field(default_factory=list)
    scored_layers: int = 0


@dataclass(frozen=True)
class Watched(Method):
    """A method that notes the seconds of its scores and selections."""

    inner: Method
    spent: Spent

    name: ClassVar[str] = "watched"

    @property
    def observation(self) -> Observation:
        """The method's own."""
        return self.inner.observation

    @property
    def shares_layers(self) -> int:
        """The method's own."""
        return self.inner.shares_layers

    def scores(self, rows: LayerRows) -> Tensor:
        """The method's own."""
        self.spent.scored_layers += 1
        return self._timed(lambda: self.inner.scores(rows))

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """The method's own."""
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
    """28 layers with the attention of a 3 B Llama, narrow and random in all else."""
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
    """Rows of one model: seconds of scores and selections per eviction, of the whole eviction, and layers scored.

    Beside the ratio of the medians stands the median of the ratios at each block: two evictions that follow each other
    meet the machine in the same state.
    """
    spent = evictions(model, tokenizer, plan)
    labels = {reuse: f"chunkkv, reuse {reuse}" for reuse in spent}
    condition = f"{name}, budget {plan.budget}, block {plan.block}"
    found: list[Row] = []
    for metric in ("selecting", "evicting"):
        seconds = {label: getattr(spent[reuse], metric) for reuse, label in labels.items()}
        found += speed_rows(condition, metric, "seconds per eviction", seconds, labels[1])
        pairs = [
            with_reuse / without for without, with_reuse in zip(*seconds.values(), strict=True)
        ]
        found += speed_rows(
            condition,
            f"{metric} at the same block",
            f"of {labels[1]}",
            {labels[2]: pairs},
            labels[2],
        )
    scored = {
        labels[reuse]: [each.scored_layers / len(each.evicting)] for reuse, each in spent.items()
    }
    return [*found, *speed_rows(condition, "layers scored", "per eviction", scored, labels[1])]


def evictions(model: LoadedModel, tokenizer: ChatTokenizer, plan: Plan) -> dict[int, Spent]:
    """Hold the same text in a session of each kind, block by block in rotation; what their evictions took."""
    spent = {reuse: Spent() for reuse in LAYERS_IN_A_GROUP}
    settings = WorkerSettings(slots=len(spent), max_budget=plan.budget, block_tokens=plan.block)
    blocks = said_blocks(tokenizer, plan)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(build_store(model, Path(folder), 1 << 30)) as store,
    ):
        engine = Engine(Parts(model, tokenizer, store, settings))
        for reuse, clock in spent.items():
            session = engine.open(_spec(reuse, plan), wire.SessionState())
            session.method = Watched(ChunkKV(reuse=reuse), clock)
            engine.seat(session)
        for index, block in enumerate(blocks):
            for reuse in _rotated(LAYERS_IN_A_GROUP, index):
                _say(engine, str(reuse), block, spent[reuse], plan)
        engine.close()
    return spent


def said_blocks(tokenizer: ChatTokenizer, plan: Plan) -> Tensor:
    """A generated conversation's first blocks: int64 `[blocks, 1, block]`."""
    wanted = plan.blocks * plan.block
    messages = generate(plan.seed, wanted + 1000, split="held_out").messages()
    token_ids = [
        token for said in tokenizer.prompt([], messages, [], False) for token in said.token_ids
    ]
    assert len(token_ids) >= wanted, "the conversation is longer than the blocks"
    return torch.tensor(token_ids[:wanted]).view(plan.blocks, 1, plan.block)


def timed(work: Callable[[], _T]) -> tuple[float, _T]:
    """Seconds that some work took, on the device as well, and what it returned."""
    _wait()
    started = time.perf_counter()
    done = work()
    _wait()
    return time.perf_counter() - started, done


def _say(engine: Engine, name: str, block: Tensor, spent: Spent, plan: Plan) -> None:
    session = engine.session(name)
    engine.forward([session], block)
    spent.selecting.append(0.0)
    seconds, _ = timed(lambda: engine.evict(session))
    if spent.selecting[-1]:
        spent.evicting.append(seconds)
    else:
        spent.selecting.pop()  # within the budget: nothing to select


def _spec(reuse: int, plan: Plan) -> wire.SessionSpec:
    return wire.SessionSpec(
        session=str(reuse), epoch=1, method="chunkkv", budget=plan.budget, seed=plan.seed
    )


def _rotated(order: Sequence[int], by: int) -> list[int]:
    return [*order[by % len(order) :], *order[: by % len(order)]]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
