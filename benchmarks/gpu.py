"""All that is to be measured on a GPU, in one command.

`python -m benchmarks gpu` takes a random Llama of 1 B parameters (`throughput --shape large`) on
a machine with a GPU: attention with cuDNN and without; prefill and decode at 4K to 128K tokens, 1 to
64 sessions at once, both beside transformers with a kept cache; whole turns with recall and
without; repairs of 32K to 4M candidates; swap-ins beside a plain copy of the same bytes; and the
tiers. `--tiny` runs all of it in small sizes on the packaged model, on a CPU, too: that it runs is
all that it shows. The result file goes to `benchmarks/results/`.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from benchmarks import repair
from benchmarks.benchmark import BadOptions, Benchmark, Measured
from benchmarks.made_up_copy import make_ids
from benchmarks.options import option
from benchmarks.repair_keys import SyntheticKeys
from benchmarks.subjects import Clock, Timed, Worker, copy_plain
from benchmarks.throughput import Plan as ThroughputPlan
from benchmarks.throughput import build_texts, describe_model, load, speed_rows
from benchmarks.tiers.benchmark import SHAPES, TIERS, compare_subjects
from benchmarks.tiers.subjects import Pages
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_store
from kvrecall_server.reporting.results import Row
from kvstore.format.buffers import empty_rows
from workers.cache.active_cache import KVShape
from workers.engine.engine import Engine, Parts
from workers.engine.selection import Selection
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel, cache_argument
from workers.model.tokenizer import ChatTokenizer

TRANSFORMERS = "transformers, cache kept"
FULL_CACHE = "kvrecall, full"
# Codes of all keys, and graphs of all steps, of one session.
CODES_BYTES, GRAPHS = 8 << 30, 64
COPY = "plain copy"
# Steps that are not counted, before those that are.
WARM = 3
# Turns that are timed after a context.
TURNS = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts: tokens, but `budget` in rows and `steps` and `repeats` in runs.

    `contexts` are of one session that decodes, `batches` numbers of sessions of `batch_context`
    tokens, `recalls` of a session that answers, `candidates` the fewest and the most of a repair,
    `swaps` of a session that swaps in.
    """

    shape: str
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    batch_context: int
    budget: int
    block: int
    steps: int
    candidates: tuple[int, int]
    repair_shape: KVShape
    recalls: tuple[int, ...]
    swaps: tuple[int, ...]
    tiers: tuple[str, ...]
    pages: str
    megabytes: int
    repeats: int


FULL = Sizes(
    shape="large",
    contexts=tuple(4096 << i for i in range(6)),
    batches=tuple(1 << i for i in range(7)),
    batch_context=2048,
    budget=2048,
    block=2048,
    steps=64,
    candidates=(1 << 15, 1 << 22),
    repair_shape=KVShape(1, repair.QWEN_7B.n_heads, repair.QWEN_7B.n_kv_heads, 128),
    recalls=(8192, 32_768),
    swaps=(4096, 32_768),
    tiers=("ram", "nvme"),
    pages="large",
    megabytes=1024,
    repeats=7,
)
TINY = Sizes(
    shape="reference",
    contexts=(96, 160),
    batches=(1, 2),
    batch_context=48,
    budget=80,
    block=32,
    steps=2,
    candidates=(128, 256),
    repair_shape=KVShape(1, 4, 2, 16),
    recalls=(160,),
    swaps=(100,),
    tiers=("ram", "nvme"),
    pages="reference",
    megabytes=1,
    repeats=1,
)


@dataclass(frozen=True)
class Models:
    """One model as kvrecall and as transformers run it, its tokenizer, and random token ids."""

    ours: LoadedModel
    theirs: Any
    tokenizer: ChatTokenizer
    ids: Tensor


def open_models(sizes: Sizes, seed: int) -> Models:
    """The model of these sizes, on the GPU if there is one."""
    model, tokenizer = load(sizes.shape, seed)
    longest = max(*sizes.contexts, sizes.batch_context) + WARM + sizes.steps
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, len(tokenizer.inner), (1, longest), generator=random)
    return Models(model, copy_plain(model), tokenizer, ids)


def decode_rows(models: Models, sizes: Sizes, seed: int) -> Iterator[Row]:
    """Prefill in blocks, then decode, of one session by its context."""
    for context in sizes.contexts:
        yield from _compare(models, sizes, 1, context, f"one session of {context} tokens")


def batch_rows(models: Models, sizes: Sizes, seed: int) -> Iterator[Row]:
    """Prefill one after the other, then decode together, by the number of sessions."""
    context = sizes.batch_context
    for batch in sizes.batches:
        yield from _compare(models, sizes, batch, context, f"{batch} sessions of {context} tokens")


def recall_rows(models: Models, sizes: Sizes, seed: int) -> Iterator[Row]:
    """First token and decode of whole turns after a context, with recall and without."""
    text = " ".join(build_texts(ThroughputPlan(seed, turns=80)))
    ids = models.tokenizer.encode(text)
    for context in sizes.recalls:
        prompt = str(models.tokenizer.inner.decode((ids * (1 + context // len(ids)))[:context]))
        recall = f"kvrecall, recall {sizes.budget}"
        by_recall = partial(_time_turns, models, sizes, prompt, "icecache", sizes.budget)
        found = {
            FULL_CACHE: _time_turns(models, sizes, prompt, "full", 2 * context),
            f"{FULL_CACHE}, captured": _time_turns(
                models, sizes, prompt, "full", 2 * context, step_graphs=GRAPHS
            ),
            f"kvrecall, budget {sizes.budget}": _time_turns(
                models, sizes, prompt, "snapkv", sizes.budget
            ),
            recall: by_recall(),
            f"{recall}, kernels": by_recall(device_codes_bytes=CODES_BYTES),
            f"{recall}, kernels, captured": by_recall(
                device_codes_bytes=CODES_BYTES, step_graphs=GRAPHS
            ),
        }
        condition = f"turn after {context} tokens"
        first = {name: [turn.first_token for turn in turns] for name, turns in found.items()}
        decode = {
            name: [(turn.output_tokens - 1) / turn.decode for turn in turns]
            for name, turns in found.items()
        }
        yield from speed_rows(condition, "time to first token", "seconds", first, FULL_CACHE)
        yield from speed_rows(condition, "decode", "tokens per second", decode, FULL_CACHE)


def attention_rows(models: Models, sizes: Sizes, seed: int) -> Iterator[Row]:
    """Attention of a token over rows that grow by one a step, as an answer's do, by kernel.

    cuDNN plans each new length anew, so kvrecall and this process take it out of torch's choice.
    """
    shape = models.ours.shape
    for rows in sizes.contexts:
        like: dict[str, Any] = {"dtype": models.ours.dtype, "device": models.ours.device}
        heads, group = shape.n_kv_heads, shape.n_heads // shape.n_kv_heads
        keys = torch.randn(1, heads, rows + WARM + sizes.steps, shape.head_dim, **like)
        queries = torch.randn(1, heads, group, shape.head_dim, **like)
        seconds: dict[str, list[float]] = {}
        for name, cudnn in (("torch's choice without cuDNN", False), ("with cuDNN", True)):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            lengths = iter(range(rows, keys.shape[2]))
            seconds[name] = _time_steps(sizes, partial(_attend, queries, keys, lengths))
        torch.backends.cuda.enable_cudnn_sdp(False)
        baseline = next(iter(seconds))
        condition = f"attention over {rows} rows and more"
        yield from speed_rows(condition, "attention", "seconds", seconds, baseline)


def _attend(queries: Tensor, keys: Tensor, lengths: Iterator[int]) -> Tensor:
    rows = keys[:, :, : next(lengths)]
    return scaled_dot_product_attention(queries, rows, rows)


def repair_rows(models: Models, sizes: Sizes, seed: int) -> Iterator[Row]:
    """Seconds of repairs by the number of candidates, from pages and from a copy."""
    keys = SyntheticKeys(sizes.repair_shape, torch.bfloat16, seed)
    plan = repair.Plan(promoted=48, repeats=sizes.repeats)
    yield from repair.measure(keys, plan, list(repair.double(*sizes.candidates)))


def swap_rows(models: Models, sizes: Sizes, seed: int) -> Iterator[Row]:
    """Swap-ins of a session from memory, beside one copy of its bytes onto the device."""
    for tokens in sizes.swaps:
        seconds = _time_swaps(models, sizes, tokens)
        size = tokens * models.ours.shape.n_layers * models.ours.shape.n_kv_heads
        size *= models.ours.shape.row_bytes(models.ours.dtype)
        speeds = {name: [size / each for each in found] for name, found in seconds.items()}
        condition = f"swap-in of {tokens} tokens"
        yield from speed_rows(condition, "copy", "bytes per second", speeds, COPY)


def tier_rows(models: Models, sizes: Sizes, seed: int) -> Iterator[Row]:
    """Bandwidth of the tiers and of row stores over them, beside their limits."""
    pages = Pages(SHAPES[sizes.pages], sizes.megabytes << 20, seed)
    for tier in sizes.tiers:
        compare = partial(compare_subjects, f"{sizes.pages}, {tier}", pages, sizes.repeats)
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            yield from TIERS[tier](pages, Path(folder), compare)


PARTS: dict[str, Callable[[Models, Sizes, int], Iterator[Row]]] = {
    "attention": attention_rows,
    "decode": decode_rows,
    "batches": batch_rows,
    "recall": recall_rows,
    "repair": repair_rows,
    "swaps": swap_rows,
    "tiers": tier_rows,
}


def _compare(
    models: Models, sizes: Sizes, batch: int, context: int, condition: str
) -> Iterator[Row]:
    """Prefill and decode of transformers, of full caches and of a budget."""
    room = context + WARM + sizes.steps
    found = {
        TRANSFORMERS: _time_theirs(models, sizes, batch, context),
        FULL_CACHE: _time_ours(models, sizes, batch, context, "full", room),
        f"kvrecall, budget {sizes.budget}": _time_ours(
            models, sizes, batch, context, "snapkv", sizes.budget
        ),
    }
    prefill = {name: [batch * context / spent] for name, (spent, _) in found.items()}
    decode = {name: [batch / each for each in steps] for name, (_, steps) in found.items()}
    unit = "tokens per second"
    yield from speed_rows(condition, "prefill", unit, prefill, TRANSFORMERS)
    yield from speed_rows(condition, "decode", unit, decode, TRANSFORMERS)


def _time_theirs(
    models: Models, sizes: Sizes, batch: int, context: int
) -> tuple[float, list[float]]:
    """Seconds of transformers' prefill in blocks, and of each decode step, with a kept cache."""
    cache = DynamicCache(config=models.theirs.config)

    @torch.inference_mode()
    def forward(ids: Tensor) -> Tensor:
        ids = ids.expand(batch, -1).to(models.ours.device)
        out = models.theirs(
            input_ids=ids,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(models.theirs): cache},
        )
        chosen: Tensor = out.logits[:, -1].argmax(-1)
        return chosen

    def prefill() -> None:
        for block in _blocks(models, sizes, context):
            forward(block)

    spent, _ = repair.timed(prefill)
    return spent, _time_steps(sizes, lambda: forward(models.ids[:, :1]))


def _time_ours(
    models: Models, sizes: Sizes, batch: int, context: int, method: str, rows: int
) -> tuple[float, list[float]]:
    """Seconds of the engine's prefills in blocks, one session after the other, and of each step."""
    settings = WorkerSettings(slots=batch, max_budget=rows, block_tokens=sizes.block)
    with _open_engine(models, settings) as engine:
        residents = [_open(engine, f"s{index}", method, rows) for index in range(batch)]

        def prefill() -> None:
            for resident in residents:
                for block in _blocks(models, sizes, context):
                    engine.forward([resident], block)
                    engine.evict(resident)

        spent, _ = repair.timed(prefill)
        tokens = models.ids[:, :1].expand(batch, -1)
        return spent, _time_steps(sizes, lambda: engine.forward(residents, tokens).argmax(-1))


def _time_turns(
    models: Models, sizes: Sizes, prompt: str, method: str, rows: int, **more: Any
) -> list[Timed]:
    """Turns of one question each after a prompt, without the first; more: settings of the worker."""
    settings = WorkerSettings(slots=1, max_budget=rows, block_tokens=sizes.block, **more)
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker.start(models.ours, models.tokenizer, Path(folder), settings)
        with closing(worker):
            worker.open("s", method, rows)
            worker.append("s", prompt)
            turns = list[Timed]()
            for _ in range(1 + TURNS):
                clock = Clock()
                done = worker.ask("s", "Go on.", sizes.steps, clock).result()
                turns.append(clock.timed(done.prompt_tokens))
    return turns[1:]


def _blocks(models: Models, sizes: Sizes, context: int) -> list[Tensor]:
    """The first `context` token ids, `[1, t]` each."""
    starts = range(0, context, sizes.block)
    return [models.ids[:, start : min(start + sizes.block, context)] for start in starts]


def _time_steps(sizes: Sizes, step: Callable[[], Tensor]) -> list[float]:
    """Seconds of each step, without the first."""
    return [repair.timed(step)[0] for _ in range(WARM + sizes.steps)][WARM:]


def _time_swaps(models: Models, sizes: Sizes, tokens: int) -> dict[str, list[float]]:
    """Seconds of swap-ins and of copies of as many bytes, in turns, without the first."""
    model = models.ours
    shape = model.shape
    settings = WorkerSettings(slots=1, max_budget=tokens, block_tokens=sizes.block)
    with _open_engine(models, settings) as engine:
        session = _open(engine, "s", "full", tokens).session
        engine.swap_out(session)
        rows = empty_rows(engine.store.layout.rows_shape(tokens), model.dtype).fill_(1)
        engine.store.append("s", rows, make_ids(engine.store.layout, 0, tokens))
        engine.store.flush("s")
        positions = torch.arange(tokens, dtype=torch.int32).repeat(shape.n_kv_heads, 1)
        promoted = torch.zeros_like(positions, dtype=torch.bool)
        session.length = tokens
        selection = Selection((positions,) * shape.n_layers, (promoted,) * shape.n_layers)
        seconds: dict[str, list[float]] = {COPY: [], "swap-in": []}
        for _ in range(1 + sizes.repeats):
            seconds[COPY].append(repair.timed(lambda: rows.to(model.device, copy=True))[0])
            session.selection = selection
            seconds["swap-in"].append(repair.timed(lambda: engine.swap_in(session))[0])
            engine.swap_out(session)
    return {name: found[1:] for name, found in seconds.items()}


@contextmanager
def _open_engine(models: Models, settings: WorkerSettings) -> Iterator[Engine]:
    """An engine over a row store whose memory holds all pages of the sessions that swap."""
    with tempfile.TemporaryDirectory() as folder:
        room = 2 * settings.max_budget * models.ours.shape.n_layers
        room *= models.ours.shape.n_kv_heads * models.ours.shape.row_bytes(models.ours.dtype)
        with closing(build_store(models.ours, Path(folder), room)) as store:
            engine = Engine(Parts(models.ours, models.tokenizer, store, settings))
            try:
                yield engine
            finally:
                engine.close()


def _open(engine: Engine, name: str, method: str, budget: int) -> ResidentSession:
    """A session in a slot whose rows are not stored: the store's speed is measured by itself."""
    spec = pb.SessionSpec(session=name, epoch=1, budget=budget, method=method)
    session = engine.open(spec, pb.SessionState())
    session.stored = False
    return engine.swap_in(session)


@dataclass(frozen=True)
class Plan:
    """Which parts are measured, and whether in small sizes."""

    seed: int = 0
    tiny: bool = option(False, "small sizes; runs without a GPU")
    parts: tuple[str, ...] = option(tuple(PARTS), "only these parts", choices=tuple(PARTS))


def measure(plan: Plan) -> Measured:
    """Measure parts on the GPU, or in small sizes. Raises BadOptions."""
    if not (plan.tiny or torch.cuda.is_available()):
        raise BadOptions("there is no GPU here; --tiny runs all parts in small sizes without one")
    sizes = TINY if plan.tiny else FULL
    models = open_models(sizes, plan.seed)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return Measured(
        f"gpu-{gpu.replace(' ', '-').lower()}.json",
        f"{sizes.shape} ({describe_model(models.ours)}), {gpu}",
        (row for part in plan.parts for row in PARTS[part](models, sizes, plan.seed)),
        plan.seed,
    )


BENCHMARK = Benchmark("gpu", "all that is to be measured on a GPU, in one run", Plan, measure)
