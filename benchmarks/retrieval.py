"""Time of decoding steps with retrieval over made-up rows, beside full attention.

`python -m benchmarks retrieval` measures one layer in the shapes of models: the scan over every row and the descent
(`summaries`), by native code and with torch's attention behind its search, and the DCI-tree, each with its parts by
torch; `--gpu` attends on a GPU, with the rows on the host, and runs the kernels of `workers/kernels/` over codes on
the GPU and rows in either place. Keys have a few directions of much variance, as a model's have; a
query is a noisy key of the last ones. `--of steps` measures whole steps of a model on a CPU, of one session and
of eight at once, beside the full cache and the budget alone (`benchmarks/decode_steps.py`).
Arms run in rotation. Times are CPU time on a CPU, and time until the device is done on a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import decode_steps
from benchmarks.benchmark import BadOptions, Benchmark, Measured
from benchmarks.made_up_copy import build_copy
from benchmarks.options import option
from benchmarks.subjects import clock
from benchmarks.throughput import describe_model
from kvrecall.domain.settings.retrieval import Retrieval
from kvrecall_server.reporting.results import Row, speed_row
from kvstore.format.page import PageLayout
from kvstore.index.key_codes import KeyCodes, SharedCodes, encode_keys
from kvstore.index.paged_rows import PagedRows
from workers.cache.logits import Logits
from workers.cache.transfers import Transfers
from workers.model.weights.quantized_linear import Quantization
from workers.native.attention import NativeAttention
from workers.retrieval.retriever import Retriever
from workers.retrieval.sampling import ROTATIONS
from workers.retrieval.step import RetrievalStep

SHAPES = {"7B": (4, 7, 128), "SmolLM2": (3, 3, 64), "reference": (2, 2, 64)}
"""KV heads, queries of each, and channels."""
CPU_ROWS = (8192, 16_384, 32_768, 65_536, 262_144)
GPU_ROWS = (8192, 32_768, 131_072)
INDEXES: tuple[Literal["exact", "summaries", "tree"], ...] = ("exact", "summaries", "tree")
QUANTIZED: tuple[Quantization, ...] = ("int8", "int4")
NATIVE = {"exact": "exact, native", "summaries": "summaries, native"}
KERNELS = ("kernels, rows on the host", "kernels, rows on the GPU")


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement."""

    seed: int = 0
    of: str = option("layer", choices=("layer", "steps"))
    model: str = option("reference", "of steps")
    quantize: str = option("none", "of steps: its weights", choices=("none", *QUANTIZED))
    batches: tuple[int, ...] = option((1, 8), "sessions of a step")
    gpu: bool = option(False, "attend on a GPU, in bfloat16")
    rows: tuple[int, ...] = option(
        (), "stored rows per head; default: by the device, or 4096 for steps"
    )
    budget: int = option(256, "rows; a quarter is active")
    shapes: tuple[str, ...] = option(("7B",), "of the layer", choices=tuple(SHAPES))
    indexes: tuple[str, ...] = option(
        INDEXES, "of the layer; each copies its rows", choices=INDEXES
    )
    scan: float = option(0.1, "of the tree")
    rounds: int = 15
    threads: int = option(1, "on the host")


def measure(plan: Plan) -> Measured:
    """Measure a layer, or whole steps, over each number of rows."""
    torch.set_num_threads(plan.threads)
    if plan.of == "steps":
        return measure_steps(plan)
    where = "gpu" if plan.gpu else "cpu"
    described = (
        f"{name}: {heads} KV heads, {group} queries each, {dim} channels"
        for name, (heads, group, dim) in SHAPES.items()
        if name in plan.shapes
    )
    model = f"one layer, {'; '.join(described)}"
    return Measured(f"retrieval-step-{where}.json", model, step_rows(plan), plan.seed)


def measure_steps(plan: Plan) -> Measured:
    """Measure whole steps of a model. Raises BadOptions where there is no native code."""
    if NativeAttention.open(ROTATIONS) is None:
        raise BadOptions("native code was not built: pip install -e . with a C++ compiler")
    quantize = next((each for each in QUANTIZED if each == plan.quantize), None)
    subject = decode_steps.load(plan.model, quantize)
    sizes = [
        decode_steps.Steps(rows, batch, plan.budget, plan.rounds, plan.seed)
        for rows in plan.rows or (4096,)
        for batch in plan.batches
    ]
    rows = decode_steps.measure_steps(subject, sizes)
    parts = (plan.model, quantize, "bfloat16" if subject.packed else None)
    name = "-".join(part for part in parts if part)
    described = f"{name} ({describe_model(subject.native)})"
    return Measured(f"retrieval-steps-{name}-cpu.json", described, rows, plan.seed)


def step_rows(plan: Plan) -> Iterator[Row]:
    """Rows of all numbers of stored rows."""
    for shape in plan.shapes:
        for n in plan.rows or (GPU_ROWS if plan.gpu else CPU_ROWS):
            with torch.inference_mode():
                found = list(time_step(n, shape, plan))
            yield from found


def make_rows(n: int, shape: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values `[1, heads, n, d]`, and queries `[1, heads, group, d]`, float32."""
    heads, group, dim = SHAPES[shape]
    random = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0.5, -0.5, dim)
    keys = torch.randn(1, heads, n, dim, generator=random) * scale
    values = torch.randn(1, heads, n, dim, generator=random)
    noise = torch.randn(1, heads, group, dim, generator=random) * scale
    return keys, values, keys[:, :, -group:] + noise


def time_step(n: int, shape: str, plan: Plan) -> Iterator[Row]:
    """The rows of one number of stored rows."""
    heads, _, dim = SHAPES[shape]
    device = torch.device("cuda" if plan.gpu else "cpu")
    dtype = torch.bfloat16 if plan.gpu else torch.float32
    keys, values, queries = (each.to(dtype) for each in make_rows(n, shape, plan.seed))
    active = torch.arange(n - plan.budget // 4, n)
    positions = active.to(torch.int32).expand(1, heads, -1).contiguous().to(device)
    rows = (keys[:, :, active].to(device), values[:, :, active].to(device), positions)
    whole = (keys.to(device), values.to(device))
    asked = queries.to(device)
    native = NativeAttention.open(ROTATIONS)
    arms: dict[str, Callable[[], object]] = {
        "full attention": lambda: scaled_dot_product_attention(asked, *whole)
    }
    for index in (each for each in INDEXES if each in plan.indexes):
        settings = Retrieval(index=index, scan=plan.scan)
        layout = PageLayout(1, heads, dim, dtype, "made up")
        stored = build_copy(layout, settings, [(keys[0], values[0])], native)
        retriever = Retriever(stored, settings, plan.budget * 3 // 4)
        arms |= retrieval_arms(index, retriever, queries, asked, rows)
        if index in NATIVE and native is not None and not plan.gpu:
            step = RetrievalStep([retriever], Transfers(device), native)
            arms[NATIVE[index]] = partial(step.attend, 0, asked, rows, None, Logits(dim**-0.5))
        if index == "exact" and plan.gpu:
            arms |= kernel_arms(retriever, asked, rows)
    times = {name: list[float]() for name in arms}
    for number in range(plan.rounds + 1):
        for name, arm in arms.items():
            seconds = clock(device, arm)
            if number:  # the first round warms up
                times[name].append(seconds)
    condition = f"{n} rows, budget {plan.budget}, {shape}"
    for name, found in times.items():
        yield speed_row(condition, name, "seconds", found)
    for name in (*INDEXES, *NATIVE.values(), *KERNELS):
        if name in times:
            pairs = zip(times["full attention"], times[name], strict=True)
            yield speed_row(
                condition, f"full attention / {name}", "ratio", [a / b for a, b in pairs]
            )


def retrieval_arms(
    name: str,
    retriever: Retriever,
    queries: Tensor,
    asked: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
) -> dict[str, Callable[[], object]]:
    """A step with retrieval, and its parts; `asked`: the queries on the device."""
    step = RetrievalStep([retriever], Transfers(asked.device))
    scale = queries.shape[-1] ** -0.5
    logits = Logits(scale)
    active = rows[2][0].cpu()
    wanted, _ = retriever.search(0, queries[0], active, scale)
    extended = step.extend(0, asked, rows, None, logits)
    return {
        name: partial(step.attend, 0, asked, rows, None, logits),
        f"{name}: search": lambda: retriever.search(0, queries[0], active, scale),
        f"{name}: reading": lambda: retriever.copy.rows.gather(0, wanted),
        f"{name}: attention": lambda: scaled_dot_product_attention(
            asked, extended[0], extended[1], attn_mask=extended[2]
        ),
    }


def kernel_arms(
    retriever: Retriever, asked: Tensor, rows: tuple[Tensor, Tensor, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Steps by kernels over codes on the queries' device, and rows on the host and on that device."""
    # Here, since triton comes with torch for GPUs.
    from workers.kernels.attention import KernelAttention

    kernels = KernelAttention(Transfers(asked.device), ROTATIONS)
    searched = retriever.searched_rows(0)
    assert searched is not None, "of so many rows all are scored"
    layout, pages = searched.rows.layout, searched.rows.pages

    def encode(layout: PageLayout, page: Tensor) -> Tensor:
        return encode_keys(layout, page).to(asked.device)

    codes = KeyCodes(layout, SharedCodes(), encode)
    codes.append([None] * len(pages), pages)
    arms: dict[str, Callable[[], Tensor]] = {}
    for name, device in zip(KERNELS, (torch.device("cpu"), asked.device), strict=True):
        stored = PagedRows(layout)
        stored.append([page.to(device) for page in pages], searched.rows.length)
        table = kernels.describe([replace(searched, rows=stored, codes=codes.addresses)])
        scale = asked.shape[-1] ** -0.5
        attend = partial(kernels.attend, asked, rows, None, table, scale=scale)
        arms[name] = partial(_attend, attend, (codes, stored))
    return arms


def _attend(attend: Callable[..., tuple[Tensor, Tensor]], _memory: object) -> Tensor:
    """Attend over memory that the kernels know by its addresses alone, and that is held here."""
    return attend(layer=0, rotation=0)[0]


BENCHMARK = Benchmark(
    "retrieval-step", "a decoding step with retrieval: scan, descent and tree", Plan, measure
)
