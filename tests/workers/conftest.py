"""Small real models, served by real schedulers over real row stores, beside transformers' own full cache."""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from kvrecall.domain.page_ids import join_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.page import PageLayout
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from reference import MODEL_PATH
from tests.workers.native_build import build_native, open_native
from workers.cache.active_cache import ActiveCache, KVShape
from workers.cache.forward_step import BlockAttention
from workers.engine.engine import Engine, Parts
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.model.decoding.decoder import Decoder, build_decoder
from workers.model.loader import LoadedModel, load_model
from workers.model.tokenizer import ChatTokenizer, load_tokenizer
from workers.native.attention import NativeAttention
from workers.native.library import open_library
from workers.scheduler.scheduler import Scheduler

WAIT = 600
"""Seconds after which a job counts as lost. Jobs take far less; nothing is timed with it."""
WORDS = (
    "the",
    "river",
    "lamp",
    "seven",
    "blue",
    "station",
    "4",
    "9",
    "paper",
    "north",
    "garden",
    "27",
    "copper",
    "market",
)


DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}


def tiny_config(family: str) -> PreTrainedConfig:
    """One to three layers, four query heads over two KV heads, the reference model's vocabulary.

    Weights are drawn widely, so that attention is sharp and no two tokens are nearly as likely.
    """
    shape: dict[str, Any] = {
        "vocab_size": 1280,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,
        "eos_token_id": 1,
        "bos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    configs = {
        "llama": lambda: LlamaConfig(num_hidden_layers=2, **shape),
        "one layer": lambda: LlamaConfig(num_hidden_layers=1, **shape),
        "qwen2": lambda: Qwen2Config(num_hidden_layers=3, **shape),
        "qwen3": lambda: Qwen3Config(num_hidden_layers=2, **shape),
        "mistral": lambda: MistralConfig(num_hidden_layers=2, sliding_window=None, **shape),
        "hybrid": lambda: Qwen3_5TextConfig(num_hidden_layers=4, **DELTA_NETS, **shape),
    }
    return configs[family]()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models are quickest on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the native code is; it is built if the installation has none."""
    return build_native(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="session")
def native(native_folder: Path) -> NativeAttention:
    """The native code for this CPU."""
    return open_native(native_folder)


@pytest.fixture(scope="session")
def decoder(loaded: Callable[[str], LoadedModel], native_folder: Path) -> Callable[[str], Decoder]:
    """decoder(family): what computes the steps of the model that the tests load of it."""
    level, library = open_library(torch.backends.cpu.get_cpu_capability(), native_folder)
    assert level is not None
    assert library is not None
    return cache(lambda family: build_decoder(loaded(family), level, library))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """model_path(family).

    A directory with a model of that family, and the reference model's tokenizer.
    """

    @cache
    def make(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        if family == "reference":
            shutil.copytree(MODEL_PATH, path, dirs_exist_ok=True)
            return path
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).save_pretrained(
            path
        )
        AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def loaded(model_path: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """loaded(family): the model as kvrecall serves it."""
    return cache(lambda family: load_model(model_path(family), dtype=torch.float32))


@pytest.fixture(scope="session")
def plain(model_path: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    """plain(family): the same model as transformers runs it, with its own attention."""
    return cache(
        lambda family: AutoModelForCausalLM.from_pretrained(
            model_path(family), dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
    )


@pytest.fixture(scope="session")
def tokenizer(
    loaded: Callable[[str], LoadedModel], model_path: Callable[[str], Path]
) -> ChatTokenizer:
    """The reference model's tokenizer."""
    return load_tokenizer(model_path("reference"), loaded("reference").eos_token_ids)


@pytest.fixture(scope="session")
def continuation(plain: Callable[[str], PreTrainedModel]) -> Callable[..., list[int]]:
    """continuation(family, token_ids, tokens).

    What transformers' greedy `generate` says next, full cache.

    With `endless` it goes on after an end token.
    """

    def say(family: str, token_ids: Sequence[int], tokens: int, endless: bool = False) -> list[int]:
        prompt = torch.tensor([list(token_ids)])
        ends = {"eos_token_id": 2**30} if endless else {}
        model: Any = plain(family)
        said = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            **ends,
        )
        return said[0, prompt.shape[1] :].tolist()

    return say


@pytest.fixture(scope="session")
def words() -> Callable[..., str]:
    """words(count, seed): text without meaning, the same for the same seed."""

    def say(count: int, seed: int = 0) -> str:
        return " ".join(random.Random(seed).choices(WORDS, k=count))

    return say


class WatchedEngine(Engine):
    """An engine that records every forward pass: the number of sessions, and of tokens in each."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.passes: list[tuple[int, int]] = []

    def forward(
        self,
        residents: Sequence[ResidentSession],
        token_ids: Tensor,
        logits_to_keep: int = 1,
        attention: BlockAttention | None = None,
    ) -> Tensor:
        self.passes.append((token_ids.shape[0], token_ids.shape[1]))
        return super().forward(residents, token_ids, logits_to_keep, attention)


class LocalWorker:
    """A scheduler with short calls for tests; `events` are those of each session's last turn."""

    def __init__(self, parts: Parts) -> None:
        self.engine = WatchedEngine(parts)
        self.scheduler = Scheduler(self.engine)
        self.events: dict[str, list[pb.TurnEvent]] = {}

    def open(
        self,
        name: str = "s",
        *,
        state: pb.SessionState | None = None,
        budget: int = 1024,
        **spec: Any,
    ) -> pb.MemoryReport:
        """Open a session, `full` unless `method` says otherwise; without a `row_key` it shares nothing."""
        request = pb.OpenRequest(spec=build_spec(name, budget=budget, **spec), state=state)
        return self.scheduler.open(request).result(WAIT)

    def fork(
        self, parent: str, child: str, turns: Sequence[pb.LoggedTurn], **spec: Any
    ) -> pb.ForkResult:
        """Fork a session at an earlier turn, from the log up to it."""
        page_ids = join_ids(self.engine.sessions[parent].page_ids)
        request = pb.ForkRequest(spec=build_spec(child, **spec), turns=turns, page_ids=page_ids)
        return self.scheduler.fork(request).result(WAIT)

    def submit(
        self,
        name: str,
        messages: str | Sequence[dict[str, Any]],
        *,
        generate: bool = True,
        epoch: int = 1,
        emit: Callable[[pb.TurnEvent], None] | None = None,
        repair: bool = False,
        defer_repair: bool = False,
        keep_distribution: bool = False,
        compare_with: str = "",
        episode: pb.Episode | None = None,
        length: int | None = None,
        background: bool = False,
        remembered: Sequence[pb.Passage] = (),
        **sampling: Any,
    ) -> "Future[pb.TurnDone]":
        """Begin a turn: of one user message, or of several given as role and content."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        events = self.events[name] = []
        return self.scheduler.turn(
            pb.TurnRequest(
                session=name,
                length=length,
                background=background,
                epoch=epoch,
                messages=[pb.Message(**message) for message in messages],
                generate=generate,
                sampling=pb.Sampling(**{"max_tokens": 24, **sampling}),
                repair=repair,
                defer_repair=defer_repair,
                keep_distribution=keep_distribution,
                compare_with=compare_with,
                episode=episode,
                remembered=remembered,
            ),
            emit or events.append,
        )

    def turn(
        self, name: str, messages: str | Sequence[dict[str, Any]], **options: Any
    ) -> pb.TurnDone:
        """Run a turn to its end."""
        return self.submit(name, messages, **options).result(WAIT)

    def repair(
        self, name: str, text: str = "", messages: Sequence[dict[str, Any]] = ()
    ) -> pb.RepairResult:
        """Run a repair between turns."""
        said = [pb.Message(**message) for message in messages]
        request = pb.RepairRequest(
            session=name, epoch=1, trigger="tool_result", text=text, messages=said
        )
        return self.scheduler.repair(request).result(WAIT)

    def build(
        self, name: str = "s", *plans: pb.EpisodePlan, token_ids: Sequence[int] = ()
    ) -> list[pb.Episode]:
        """Build episodes."""
        request = pb.BuildEpisodesRequest(session=name, epoch=1, plans=plans, token_ids=token_ids)
        return list(self.scheduler.build_episodes(request).result(WAIT).episodes)

    def memory(self, name: str = "s") -> pb.MemoryReport:
        """What a session holds."""
        return self.scheduler.memory(name).result(WAIT)

    def metric(self, name: str) -> float:
        """Sum of the metric's samples of this name."""
        samples = (each for family in self.engine.metrics.collect() for each in family.samples)
        return float(sum(each.value for each in samples if each.name == name))

    def shown(self, name: str = "s") -> str:
        """The text that the session's last turn streamed."""
        return "".join(event.token.text for event in self.events[name])

    def check(self) -> None:
        """Every invariant of the active cache and of the store, between two jobs."""
        self.engine.cache.check_integrity()
        self.engine.store.check()

    def close(self) -> None:
        """Stop the thread, close the store."""
        self.scheduler.close()
        self.engine.store.close()


def build_spec(session: str, **spec: Any) -> pb.SessionSpec:
    """Build a session's settings: `full` and of epoch 1, unless these say otherwise."""
    fields: dict[str, Any] = {
        "budget": 1024,
        "epoch": 1,
        "method": "full",
        "method_settings": "{}",
    }
    return pb.SessionSpec(session=session, **fields | spec)


def answer_of(done: pb.TurnDone) -> list[int]:
    """The token ids that the turn generated."""
    return list(done.token_ids[done.prompt_tokens :][: done.output_tokens])


@pytest.fixture(scope="session")
def answer() -> Callable[[pb.TurnDone], list[int]]:
    """answer(done): the token ids that a turn generated."""
    return answer_of


@pytest.fixture
def tiers_of() -> dict[int, list[Tier]]:
    """The tiers of each store that `open_store` has opened, by the store's identity."""
    return {}


@pytest.fixture
def lose_page(tiers_of: dict[int, list[Tier]]) -> Callable[[RowStore, str, int], None]:
    """lose_page(store, session, index): no tier has the page any more, unknown to the store."""

    def lose(store: RowStore, session: str, index: int) -> None:
        [page] = store.page_ids(session, [index])
        assert page is not None, "only a stored page can be lost"
        store.flush(session)
        for tier in tiers_of[id(store)]:
            tier.delete([page])

    return lose


@pytest.fixture
def open_store(
    tmp_path: Path, tiers_of: dict[int, list[Tier]]
) -> Iterator[Callable[..., RowStore]]:
    """open_store(model, directory, ram_pages, held_bytes).

    A store over RAM and NVMe, closed at the end of the test. held_bytes: of RAM of which sessions may
    hold so much, instead of `ram_pages`.
    """
    opened: list[RowStore] = []

    def make(
        model: LoadedModel,
        directory: str = "rows",
        ram_pages: int = 8,
        held_bytes: int | None = None,
    ) -> RowStore:
        shape = model.shape
        layout = PageLayout(
            shape.n_layers, shape.n_kv_heads, shape.head_dim, model.dtype, model.fingerprint
        )
        # Sessions hold three quarters at most.
        ram_bytes = ram_pages * layout.page_bytes if held_bytes is None else -(-4 * held_bytes // 3)
        tiers: list[Tier] = [RamTier(ram_bytes), NvmeTier(tmp_path / directory)]
        store = RowStore(layout, tiers)
        opened.append(store)
        tiers_of[id(store)] = tiers
        return store

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def make_worker(
    loaded: Callable[[str], LoadedModel],
    tokenizer: ChatTokenizer,
    open_store: Callable[..., RowStore],
) -> Iterator[Callable[..., LocalWorker]]:
    """make_worker(family, directory, ram_pages, layer_sensitivity, ..., held_bytes, window, **settings).

    A worker over a store of its own: see `open_store`. window: of the model, if it is to be shorter.
    """
    made: list[LocalWorker] = []

    def make(
        family: str = "llama",
        directory: str | None = None,
        ram_pages: int = 1024,
        layer_sensitivity: tuple[float, ...] | None = None,
        measure_sensitivity: Any = None,
        held_bytes: int | None = None,
        window: int | None = None,
        **settings: Any,
    ) -> LocalWorker:
        model = loaded(family)
        model = model if window is None else replace(model, max_context=window)
        chosen = WorkerSettings(**settings)
        store = open_store(model, directory or f"rows-{len(made)}", ram_pages, held_bytes)
        worker = LocalWorker(
            Parts(model, tokenizer, store, chosen, layer_sensitivity, measure_sensitivity)
        )
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.close()


@pytest.fixture
def make_cache() -> Callable[..., ActiveCache]:
    """make_cache(slots, rows).

    An active cache of a model with 2 layers, 4 query heads, 2 KV heads of size 4.
    """

    def make(slots: int = 3, rows: Sequence[int] = (16, 12)) -> ActiveCache:
        return ActiveCache(KVShape(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4), slots, rows)

    return make
