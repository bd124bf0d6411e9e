"""Native decode steps, beside torch's: the same draws, logits, rows and queries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.made_up_copy import build_copy
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from workers.cache.active_cache import EMPTY
from workers.cache.caches import Caches
from workers.cache.forward_step import ForwardStep
from workers.cache.slot_pool import KVRows
from workers.cache.transfers import Transfers
from workers.model.decoding.decoder import Decoder, build_decoder
from workers.model.loader import LoadedModel, load_model
from workers.model.weights.quantized_linear import Int4Weight, Quantization, QuantizedLinear
from workers.native.library import LEVELS, open_library
from workers.positions.chunks import Chunks
from workers.positions.placement import Placement
from workers.positions.seen_rows import SeenRows
from workers.positions.tables import RotationTables
from workers.retrieval.retriever import Retriever
from workers.retrieval.step import RetrievalStep

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "reference", "hybrid")
CAPABILITIES = {"baseline": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}
CPU = Transfers(torch.device("cpu"))
STEPS = 3

EXACT = Retrieval(index="exact")


@dataclass(frozen=True)
class Held:
    """A session: rows of its longest head, those that are stored, and how many a step draws of them.

    Without stored rows it retrieves nothing. `uneven`: its heads have rows of different numbers. `search`: how
    rows are found.
    """

    active: int
    stored: int = 0
    count: int = 0
    uneven: bool = False
    search: Retrieval = EXACT


@dataclass(eq=False)
class Sessions:
    """Sessions in slots of their own, and the passes over them.

    `chunks`: of positions behind a window, shorter than the model's; None: no session is behind it.
    """

    model: LoadedModel
    held: Sequence[Held]
    seed: int = 0
    chunks: Chunks | None = None
    caches: Caches = field(init=False)
    retrievers: list[Retriever | None] = field(init=False)
    lengths: Tensor = field(init=False)

    def __post_init__(self) -> None:
        longest = max(each.active for each in self.held)
        # A head may be three times as long as the others.
        self.caches = self.model.create_caches(len(self.held) + 1, 3 * longest + STEPS + 1, 1)
        self.retrievers = [self._open(slot, each) for slot, each in enumerate(self.held)]
        self.lengths = torch.tensor([max(each.active, each.stored) for each in self.held])

    def _open(self, slot: int, held: Held) -> Retriever | None:
        """Fill a slot, whose rows are a function of the session alone."""
        shape = self.model.shape
        random = torch.Generator().manual_seed(self.seed + 100 * held.active + held.stored)
        assert self.caches.active.claim(self.caches.active.rows) == slot
        numbers = (
            shape.n_layers,
            2,
            shape.n_kv_heads,
            max(held.active, held.stored),
            shape.head_dim,
        )
        rows = torch.randn(numbers, generator=random).to(self.model.dtype)
        for layer, (keys, values) in enumerate(rows):
            positions = torch.arange(rows.shape[3], dtype=torch.int32)[-held.active :]
            positions = positions.repeat(shape.n_kv_heads, 1)
            if held.uneven:
                positions[layer % shape.n_kv_heads, held.active // 3 + 1 :] = EMPTY
            marks = torch.zeros(positions.shape)
            last = (keys[:, -held.active :], values[:, -held.active :])
            self.caches.active.fill(slot, layer, KVRows(*last, positions, marks.bool(), marks))
        if (side := self.caches.side) is not None and side.states is not None:
            states = (torch.randn(each.shape, generator=random) for each in side.shape.states)
            side.states.put(slot, tuple(states))
        if not held.stored:
            return None
        layout = PageLayout(
            shape.n_layers, shape.n_kv_heads, shape.head_dim, self.model.dtype, "made up"
        )
        layers = [(keys[:, : held.stored], values[:, : held.stored]) for keys, values in rows]
        return Retriever(build_copy(layout, held.search, layers), held.search, held.count)

    def begin(self, number: int = 0, observe: int = 0) -> ForwardStep:
        """The pass after `number` others."""
        positions = self.lengths[:, None] + number
        step = self.caches.begin(range(len(self.held)), positions, observe)
        seen = self._place(step, positions.flatten().tolist())
        if any(self.retrievers):
            step.retrieval = RetrievalStep(self.retrievers, CPU, None, seen)
        return step

    def _place(self, step: ForwardStep, positions: Sequence[int]) -> list[SeenRows | None]:
        """Place a pass behind the window; returns how its sessions see their rows."""
        chunks = self.chunks
        if chunks is None:
            return [None] * len(positions)
        tables = RotationTables([self.model.rotations[i] for i in self.model.plan.rows])
        seen = [
            SeenRows(tables, chunks.find_segments(at)) if at >= chunks.window else None
            for at in positions
        ]
        if any(seen):
            places = torch.tensor([[chunks.place(at)] for at in positions], dtype=torch.int32)
            step.placement = Placement(places, seen)
        return seen

    @torch.inference_mode()
    def run(self, by: Decoder | LoadedModel, observe: int = 1) -> list[Tensor]:
        """Logits, rows, queries, numbers of drawn rows, and states of some passes, all `[B, ...]`."""
        random = torch.Generator().manual_seed(self.seed)
        found = []
        for number in range(STEPS):
            step = self.begin(number, observe)
            tokens = torch.randint(self.model.vocabulary, (1, 1), generator=random)
            logits = by.forward(tokens.repeat(len(self.held), 1), step)
            drawn = [0 if each is None else each.counts.rows for each in self.retrievers]
            queries = torch.stack(step.observed, 1)
            states = [part for pair in step.recurrent_states or () for part in pair]
            found += [logits, step.rows, queries, torch.tensor(drawn), *states]
            step.commit()
        return found


def check(
    model: LoadedModel,
    decoder: Decoder,
    held: Sequence[Held],
    seed: int = 0,
    chunks: Chunks | None = None,
) -> None:
    """Compare a decoder with the model's own layers."""
    expected = Sessions(model, held, seed, chunks)
    mine = Sessions(model, held, seed, chunks)
    for found, wanted in zip(mine.run(decoder), expected.run(model), strict=True):
        assert found.dtype == wanted.dtype
        deviation = float(wanted.float().std()) if wanted.numel() > 1 else 1.0
        torch.testing.assert_close(found, wanted, atol=1e-3 * max(deviation, 1e-3), rtol=1e-3)
    for memory, other in zip(
        mine.caches.active.pool.memories, expected.caches.active.pool.memories, strict=True
    ):
        assert torch.equal(memory.positions, other.positions)
        torch.testing.assert_close(memory.keys, other.keys, atol=1e-2, rtol=1e-3)
        torch.testing.assert_close(memory.values, other.values, atol=1e-2, rtol=1e-3)
    mine.caches.active.check_integrity()


@st.composite
def sessions(draw: st.DrawFn) -> list[Held]:
    held = st.builds(
        Held, active=st.integers(2, 40), uneven=st.booleans(), stored=st.just(0), count=st.just(0)
    )
    # All stored rows are drawn: a draw among near equals is the subject of tests/workers/native.
    drawn = st.builds(Held, active=st.integers(2, 40), stored=st.integers(1, 60), count=st.just(60))
    return draw(st.lists(held | drawn, min_size=1, max_size=9))


@settings(deadline=None, max_examples=40)
@given(held=sessions(), family=st.sampled_from(FAMILIES), seed=st.integers(0, 1000))
def test_a_step_is_that_of_the_models_own_layers(
    held: list[Held],
    family: str,
    seed: int,
    loaded: Callable[[str], LoadedModel],
    decoder: Callable[[str], Decoder],
) -> None:
    check(loaded(family), decoder(family), held, seed)


@settings(deadline=None, max_examples=40)
@given(
    held=sessions(),
    family=st.sampled_from(FAMILIES),
    seed=st.integers(0, 1000),
    size=st.integers(1, 15),
    more=st.integers(0, 9),
)
def test_a_step_behind_the_window_is_that_of_the_models_own_layers(
    held: list[Held],
    family: str,
    seed: int,
    size: int,
    more: int,
    loaded: Callable[[str], LoadedModel],
    decoder: Callable[[str], Decoder],
) -> None:
    check(loaded(family), decoder(family), held, seed, Chunks(3 * size + more, size))


CHUNKS = Chunks(60, 16)
MIXED = [
    Held(30, stored=2000, count=48),
    Held(7),
    Held(64, stored=300, count=20),
    Held(21, uneven=True),
    Held(1),
    Held(40, stored=5000, count=40, search=Retrieval(index="summaries", nodes=24)),
]


@pytest.mark.parametrize("chunks", [None, CHUNKS], ids=["within", "behind"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_drawn_as_the_torch_code_draws_them(
    family: str,
    chunks: Chunks | None,
    loaded: Callable[[str], LoadedModel],
    decoder: Callable[[str], Decoder],
) -> None:
    check(loaded(family), decoder(family), MIXED, chunks=chunks)


@pytest.mark.parametrize("chunks", [None, CHUNKS], ids=["within", "behind"])
@pytest.mark.parametrize("family", FAMILIES)
def test_neither_threads_nor_other_sessions_change_a_bit(
    family: str,
    chunks: Chunks | None,
    loaded: Callable[[str], LoadedModel],
    decoder: Callable[[str], Decoder],
) -> None:
    model, steps = loaded(family), decoder(family)
    torch.set_num_threads(5)
    together = Sessions(model, MIXED, chunks=chunks).run(steps)
    torch.set_num_threads(1)
    again = Sessions(model, MIXED, chunks=chunks).run(steps)
    assert all(torch.equal(*pair) for pair in zip(together, again, strict=True))
    for index, held in enumerate(MIXED):
        alone = Sessions(model, [held], chunks=chunks).run(steps)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_of_them[index])


def supported() -> list[str]:
    """Levels of instructions that this CPU has."""
    here = torch.backends.cpu.get_cpu_capability()
    return {"AVX2": ["baseline", "avx2"], "AVX512": list(LEVELS)}.get(here, ["baseline"])


@pytest.mark.parametrize("level", supported())
def test_every_level_of_instructions_that_the_cpu_has_computes_the_same(
    level: str, native_folder: Path, loaded: Callable[[str], LoadedModel]
) -> None:
    opened, library = open_library(CAPABILITIES[level], native_folder)
    assert opened == level
    assert library is not None
    check(loaded("qwen3"), build_decoder(loaded("qwen3"), level, library), MIXED)


@pytest.mark.parametrize("family", ["qwen2", "hybrid"])
def test_a_model_in_bfloat16_is_computed_in_float32_between_its_rows(
    family: str, model_path: Callable[[str], Path], native_folder: Path
) -> None:
    narrow = load_model(model_path(family), dtype=torch.bfloat16, pack=False)
    level, library = open_library(torch.backends.cpu.get_cpu_capability(), native_folder)
    assert level is not None
    assert library is not None
    steps = build_decoder(narrow, level, library)
    held = [Held(20), Held(9, stored=40, count=60)]
    logits = Sessions(narrow, held).run(steps)[0]
    by_torch = Sessions(narrow, held).run(narrow)[0]
    assert logits.dtype == torch.float32
    assert float((logits - by_torch).abs().median() / by_torch.std()) < 0.05


def test_a_pass_that_observes_nothing_gets_no_queries(
    loaded: Callable[[str], LoadedModel], decoder: Callable[[str], Decoder]
) -> None:
    step = Sessions(loaded("llama"), [Held(5)]).begin()
    decoder("llama").forward(torch.tensor([[3]]), step)
    assert step.observed == []


@pytest.mark.parametrize(
    "settings", [Retrieval(index="exact", choice="best"), Retrieval(index="tree")]
)
def test_torch_computes_a_pass_with_a_session_that_searches_in_another_way(
    settings: Retrieval,
    loaded: Callable[[str], LoadedModel],
    decoder: Callable[[str], Decoder],
) -> None:
    sessions = Sessions(loaded("llama"), [Held(5, stored=40, count=10), Held(5)])
    assert decoder("llama").takes(sessions.begin())
    retriever = sessions.retrievers[0]
    assert retriever is not None
    rows = retriever.copy.rows
    layers = [rows.rows(layer) for layer in range(rows.layout.n_layers)]
    sessions.retrievers[0] = Retriever(build_copy(rows.layout, settings, layers), settings, 10)
    assert not decoder("llama").takes(sessions.begin())


def test_torch_computes_passes_of_several_tokens(
    loaded: Callable[[str], LoadedModel], decoder: Callable[[str], Decoder]
) -> None:
    caches = loaded("llama").create_caches(1, 8, 2)
    slot = caches.active.claim(caches.active.rows)
    assert not decoder("llama").takes(caches.begin([slot], torch.tensor([[0, 1]])))
    assert decoder("llama").takes(caches.begin([slot], torch.tensor([[2]])))


class Rounded(torch.nn.Module):
    """A quantized layer as native steps compute it: weights in 4 bits are multiplied with inputs in 8."""

    def __init__(self, linear: QuantizedLinear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, inputs: Tensor) -> Tensor:
        wide = self._linear.wide
        assert isinstance(wide, torch.nn.Linear)
        if isinstance(self._linear.narrow, Int4Weight):
            groups = inputs.float().unflatten(-1, (-1, 32))
            scales = groups.abs().amax(-1, keepdim=True) / 127
            inputs = (scales * (groups / scales.clamp(min=1e-30)).round()).flatten(-2)
        bias = None if wide.bias is None else wide.bias.float()
        return torch.nn.functional.linear(inputs.float(), wide.weight.float(), bias)


@pytest.mark.parametrize("level", supported())
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "hybrid"])
def test_weights_of_few_bits_are_multiplied_as_they_are(
    family: str,
    quantize: Quantization,
    level: str,
    model_path: Callable[[str], Path],
    native_folder: Path,
) -> None:
    few = load_model(model_path(family), pack=False, quantize=quantize)
    _, library = open_library(CAPABILITIES[level], native_folder)
    assert library is not None
    steps = build_decoder(few, level, library)
    held = [Held(20), Held(9, stored=40, count=60), Held(13), Held(5), Held(30)]
    found = Sessions(few, held).run(steps)
    alone = Sessions(few, held[3:4]).run(steps)
    assert all(torch.equal(one[0], each[3]) for one, each in zip(alone, found, strict=True))
    quantized = [
        (parent, name)
        for parent in few.module.modules()
        for name, child in parent.named_children()
        if isinstance(child, QuantizedLinear)
    ]
    assert len(quantized) == 7 * len(few.plan.rows) + 6 * len(few.plan.states)
    for parent, name in quantized:
        setattr(parent, name, Rounded(getattr(parent, name)))
    wide = replace(few, module=few.module.float())
    expected = Sessions(wide, held).run(wide)
    # Rows and a convolution's inputs are kept in bfloat16 here and in float32 there, so what follows differs.
    limit_of_rows = 0.15 if few.plan.states else 0.02
    for mine, theirs, limit in (
        (found[0], expected[0], 0.4),
        (found[1][:, 0], expected[1][:, 0], limit_of_rows),
        (found[2][:, 0], expected[2][:, 0], limit_of_rows),
    ):
        assert float((mine - theirs).abs().max() / theirs.std()) < limit
