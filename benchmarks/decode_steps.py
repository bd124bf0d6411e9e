"""Whole decode steps of a model: full cache, budget alone and retrieval, and the first and the last by torch.

Where torch would compute the steps with packed weights, prompts with these and without, too.

Time does not depend on what rows say, so a session's rows are random numbers: in its slot, and where it
retrieves in its copy in host memory. Its own tokens begin at position 0.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.made_up_copy import build_copy
from benchmarks.subjects import clock
from benchmarks.throughput import speed_rows
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.models import resolve_model
from kvrecall_server.app.wiring import build_store
from kvrecall_server.reporting.results import Row
from workers.cache.slot_pool import KVRows
from workers.engine.capability import Capability
from workers.engine.engine import Engine, Parts
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer
from workers.model.weights.packed_linear import can_pack, pack_linears
from workers.model.weights.quantized_linear import Quantization
from workers.retrieval.retriever import Retriever

FULL, BUDGET, NATIVE = "full cache", "budget alone", "retrieval"
FULL_TORCH, TORCH = "full cache, torch", "retrieval, torch"
PLAIN, PACKED = "weights for native steps", "packed weights"
PROMPT_TOKENS = (16, 64, 256)
WARM = 2


@dataclass(frozen=True)
class Steps:
    """Sizes of a measurement: stored rows of a session, rows of a budget, steps of each arm."""

    rows: int
    batch: int
    budget: int
    steps: int
    seed: int


class RandomRows(Capability):
    """Retrieval of one session over random rows, before each of its passes."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever

    @property
    def retriever(self) -> Retriever:
        """Finder of the rows."""
        return self._retriever


@dataclass(frozen=True, eq=False)
class Subject:
    """A model as native steps read it, and as torch does; often the same.

    Attributes:
        native: Has native steps.
        by_torch: With the weights that torch would have if it computed the steps.
        tokenizer: Of both.
    """

    native: LoadedModel
    by_torch: LoadedModel
    tokenizer: ChatTokenizer

    @property
    def packed(self) -> bool:
        """True if torch's weights are packed."""
        return self.by_torch is not self.native


def load(name: str, quantize: Quantization | None = None) -> Subject:
    """A model by its name. Where the CPU has instructions for its weights, torch's is packed for them."""
    path = resolve_model(name)
    model = load_model(path, quantize=quantize)
    by_torch = model
    if can_pack(model.module):
        by_torch = load_model(path, quantize=quantize, pack=False)
        pack_linears(by_torch.module)
    return Subject(model, by_torch, load_tokenizer(path, model.eos_token_ids))


def step_rows(subject: Subject, sizes: Steps) -> Iterator[Row]:
    """Tokens per second of CPU time of each arm, which take their steps in rotation.

    There must be native code.
    """
    model, tokenizer = subject.native, subject.tokenizer
    random = torch.Generator().manual_seed(sizes.seed)
    rows = make_rows(model, sizes.rows, random)
    with ExitStack() as stack, torch.inference_mode():
        whole = open_engine(stack, model, tokenizer, sizes.batch, sizes.rows + 256)
        small = open_engine(stack, model, tokenizer, 2 * sizes.batch, sizes.budget)
        torch_whole = open_engine(stack, subject.by_torch, tokenizer, sizes.batch, sizes.rows + 256)
        torch_small = open_engine(stack, subject.by_torch, tokenizer, sizes.batch, sizes.budget)
        assert small.decoder is not None, "native code was built"
        for engine in (torch_whole, torch_small):
            engine.native = engine.decoder = None
        kinds = {
            FULL: (whole, "full"),
            FULL_TORCH: (torch_whole, "full"),
            BUDGET: (small, "streaming_llm"),
            TORCH: (torch_small, "icecache"),
            NATIVE: (small, "icecache"),
        }
        sessions = {
            arm: [open_session(engine, f"{arm} {i}", method, rows) for i in range(sizes.batch)]
            for arm, (engine, method) in kinds.items()
        }
        tokens = torch.randint(10, len(tokenizer.inner), (sizes.batch, 1), generator=random)

        def take(arm: str) -> Tensor:
            return kinds[arm][0].forward(sessions[arm], tokens).argmax(-1)

        seconds = rotate({arm: partial(take, arm) for arm in kinds}, sizes.steps)
    speeds = {name: [sizes.batch / each for each in found] for name, found in seconds.items()}
    sizing = f"{sizes.rows} rows, budget {sizes.budget}, {sizes.batch} at once"
    yield from speed_rows(sizing, "decode", "tokens per CPU second", speeds, FULL)


def prompt_rows(subject: Subject, sizes: Steps) -> Iterator[Row]:
    """Tokens per second of CPU time of prompts, with the weights that native steps read and with packed ones."""
    random = torch.Generator().manual_seed(sizes.seed)
    for count in PROMPT_TOKENS:
        tokens = torch.randint(10, len(subject.tokenizer.inner), (1, count), generator=random)
        with ExitStack() as stack, torch.inference_mode():
            arms: dict[str, Callable[[], Tensor]] = {}
            for name, model in ((PLAIN, subject.native), (PACKED, subject.by_torch)):
                engine = open_engine(stack, model, subject.tokenizer, 1, sizes.budget)
                session = open_session(
                    engine, name, "streaming_llm", make_rows(model, count, random)
                )
                arms[name] = partial(engine.forward, [session], tokens)
            seconds = rotate(arms, sizes.steps)
        speeds = {name: [count / each for each in found] for name, found in seconds.items()}
        condition = f"{count} tokens, budget {sizes.budget}"
        yield from speed_rows(condition, "prompt", "tokens per CPU second", speeds, PACKED)


def make_rows(model: LoadedModel, count: int, random: torch.Generator) -> Tensor:
    """Make rows of a session, `[n_layers, 2, n_kv_heads, n, head_dim]` of the model's data type."""
    shape = model.shape
    numbers = (shape.n_layers, 2, shape.n_kv_heads, count, shape.head_dim)
    return torch.randn(numbers, generator=random, dtype=torch.float32).to(model.dtype)


def rotate(arms: Mapping[str, Callable[[], Tensor]], steps: int) -> dict[str, list[float]]:
    """Seconds of CPU time of each arm's steps, forwards and backwards through the arms."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(WARM + steps):
        for name in names if number % 2 else reversed(names):
            spent = clock(torch.device("cpu"), arms[name])
            if number >= WARM:
                found[name].append(spent)
    return found


def open_engine(
    stack: ExitStack, model: LoadedModel, tokenizer: ChatTokenizer, slots: int, rows: int
) -> Engine:
    """An engine whose slots hold so many rows; the stack closes it."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    store = build_store(model, folder)
    stack.callback(store.close)
    engine = Engine(Parts(model, tokenizer, store, WorkerSettings(slots=slots, max_budget=rows)))
    stack.callback(engine.close)
    return engine


def open_session(engine: Engine, name: str, method: str, rows: Tensor) -> ResidentSession:
    """A session with the rows that its method keeps of `[n_layers, 2, n_kv_heads, n, head_dim]`."""
    budget = engine.settings.max_budget
    spec = pb.SessionSpec(session=name, epoch=1, budget=budget, method=method, method_settings="{}")
    session = engine.open(spec, pb.SessionState())
    engine.fit_budget(session, rows.shape[3])
    resident = engine.swap_in(session)
    kept = choose_kept(rows.shape[3], budget - session.config.retrieved)
    positions = kept.to(torch.int32).expand(rows.shape[2], -1).contiguous()
    for layer, (keys, values) in enumerate(rows):
        unmarked = torch.zeros(positions.shape)
        held = (keys[:, kept], values[:, kept], positions, unmarked.bool(), unmarked)
        engine.cache.fill(resident.slot, layer, KVRows(*held))
    settings = session.config.retrieval
    if settings is not None:
        layers = [(keys, values) for keys, values in rows]
        copy = build_copy(engine.store.layout, settings, layers, engine.native)
        retriever = Retriever(copy, settings, session.config.retrieved)
        retriever.ready = True
        session.capabilities = [RandomRows(retriever)]
    return resident


def choose_kept(length: int, rows: int) -> Tensor:
    """Positions of the four first rows and the newest ones, int64."""
    if rows >= length:
        return torch.arange(length)
    return torch.cat([torch.arange(4), torch.arange(length - rows + 4, length)])


def measure_steps(subject: Subject, all_sizes: Sequence[Steps]) -> Iterator[Row]:
    """Rows of all sizes."""
    for sizes in all_sizes:
        yield from step_rows(subject, sizes)
    if subject.packed:
        yield from prompt_rows(subject, all_sizes[0])
