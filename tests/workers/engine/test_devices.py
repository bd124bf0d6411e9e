"""The engine runs on an accelerator: no operation mixes its tensors with those of the CPU."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.domain.messages import Sampling
from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.engine.accelerator import (
    ACCELERATOR,
    AcceleratorMode,
    DeviceMismatch,
    WaitCounter,
    move_module,
)
from workers import methods
from workers.engine.engine import Engine, Parts
from workers.engine.session import ResidentSession
from workers.engine.settings import WorkerSettings
from workers.episodes.build import run_build
from workers.generation.sampling import Sampler, sample
from workers.generation.steps import Steps
from workers.kernels.attention import KernelAttention
from workers.kernels.device_codes import DeviceCodes
from workers.kernels.in_flight import InFlight
from workers.model.decoding.captured import CapturedSteps
from workers.model.loader import load_model
from workers.repair.repair import run_pause_repair
from workers.retrieval.device_search import DeviceSearch
from workers.retrieval.sampling import ROTATIONS
from workers.tasks.open import run_fork, run_open, run_rebuild
from workers.tasks.turn import run_turn


@pytest.mark.parametrize(
    "mixed",
    [
        lambda a, c: a + c,
        lambda a, c: a.masked_fill(c.bool(), 1.0),
        lambda a, c: c[a.long()],
        lambda a, c: torch.cat([a, c]),
        lambda a, c: torch.where(a > 0, a, c),
        lambda a, c: a.index_put_((torch.tensor([0, 1, 2]),), c),
        lambda a, _: a.numpy(),
    ],
)
def test_mixed_devices_are_found(mixed: Callable[[Tensor, Tensor], object]) -> None:
    with AcceleratorMode():
        on_it, on_the_cpu = torch.zeros(3, device=ACCELERATOR), torch.ones(3)
        assert (on_it.device, on_the_cpu.device) == (ACCELERATOR, torch.device("cpu"))
        assert on_it[0].device == (on_it + 1).device == on_the_cpu.to(on_it.device).device
        with pytest.raises(DeviceMismatch):
            mixed(on_it, on_the_cpu)
        on_it[:2] = on_the_cpu[:2]
        assert (on_it.cpu() + on_the_cpu).device == on_it[torch.tensor([1])].cpu().device


@pytest.fixture
def engine(
    model_path: Callable[[str], Any], tokenizer: Any, open_store: Callable[..., Any]
) -> Iterator[Engine]:
    """An engine on the accelerator, with the mode on."""
    loaded = load_model(model_path("llama"), dtype=torch.float32)
    move_module(loaded.module)
    model = replace(loaded, devices=(ACCELERATOR,) * len(loaded.devices))
    store = open_store(model, "rows", 8)
    settings = WorkerSettings(slots=2, block_tokens=32, prompt_tokens=24, recent=8, max_budget=512)
    with AcceleratorMode():
        built = Engine(Parts(model, tokenizer, store, settings, (1.0, 2.0)))
        assert built.cache.device == ACCELERATOR
        yield built
        built.close()


def run(engine: Engine, resident: ResidentSession | None, steps: Steps[Any]) -> Any:
    """Drive a job to its end, as the scheduler does."""
    answer: Any = None
    try:
        while True:
            wanted = steps.send(answer)
            answer = None
            if isinstance(wanted, Future):
                wanted.result(60)
            elif wanted is not None:
                assert resident is not None
                logits = engine.forward([resident], torch.tensor([[wanted.token]]))[:, -1]
                (answer,) = sample(logits, [wanted.sampler])
    except StopIteration as finished:
        return finished.value


def opened(engine: Engine, name: str = "s", **spec: Any) -> ResidentSession:
    """A new session in a slot."""
    fields: dict[str, Any] = {
        "epoch": 1,
        "budget": 60,
        "method": "snapkv",
        "layer_budgets": "uniform",
        "row_key": b"one tenant",
    } | spec
    request = pb.SessionSpec(session=name, **fields)
    return engine.swap_in(engine.open(request, pb.SessionState()))


def turn(engine: Engine, resident: ResidentSession, text: str, **fields: Any) -> pb.TurnDone:
    """A turn of one message."""
    options: dict[str, Any] = {"generate": True, "sampling": pb.Sampling(max_tokens=6)} | fields
    request = pb.TurnRequest(
        session=resident.session.name,
        epoch=1,
        messages=[pb.Message(role="user", content=text)],
        **options,
    )
    return run(engine, resident, run_turn(engine, resident, request, lambda event: None))


@pytest.mark.parametrize("method", sorted(methods.METHODS))
def test_turns_evictions_and_swaps_run_on_an_accelerator(
    method: str, engine: Engine, words: Callable[..., str]
) -> None:
    budget = 60 if methods.METHODS[method].evicts else 256
    resident = opened(engine, method=method, budget=budget)
    sampling = pb.Sampling(max_tokens=4, temperature=0.7, top_p=0.9, top_k=20)
    turn(engine, resident, words(60), sampling=sampling)
    engine.swap_out(resident.session)
    done = turn(engine, engine.swap_in(resident.session), words(50, seed=1))
    assert done.memory.length > 100
    if budget == 60:
        assert max(done.memory.active_rows) <= 60


def test_two_sessions_decode_together_on_an_accelerator(
    engine: Engine, words: Callable[..., str]
) -> None:
    residents = [opened(engine, name, method="adakv") for name in "ab"]
    for resident in residents:
        turn(engine, resident, words(60), generate=False)
    for order in (residents, residents[::-1]):
        logits = engine.forward(order, torch.tensor([[5], [6]]))
        assert logits.device == ACCELERATOR


def test_sampling_waits_for_the_accelerator_once() -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.5},
    ]
    samplers = [Sampler(Sampling(**each)) for each in settings]
    with WaitCounter() as mode:
        logits = torch.randn(len(samplers), 50, device=ACCELERATOR)
        sample(logits, samplers)
        assert mode.waits == ["tolist"]
        logits.cpu()
        torch.tensor([1], device=ACCELERATOR)
        assert mode.waits == ["tolist", "cpu", "tensor"]
        logits[logits > 0]
        assert mode.waits[3:] == ["__getitem__"]


@pytest.mark.parametrize("method", sorted(methods.METHODS))
@pytest.mark.parametrize("tokens", [1, 20])
def test_appending_tokens_never_waits_for_the_accelerator(
    tokens: int, method: str, engine: Engine
) -> None:
    """Decode steps and blocks of two sessions, with all that methods observe."""
    residents = [opened(engine, name, method=method, budget=256) for name in "ab"]
    for resident in residents:
        resident.session.stored = False
        engine.forward([resident], torch.arange(30)[None])
    with WaitCounter() as mode:
        for _ in range(2):
            engine.forward(residents, torch.ones(2, tokens, dtype=torch.int64))
    assert mode.waits == []


@pytest.mark.parametrize("captures", [False, True])
def test_steps_whose_kernels_search_never_wait_for_the_accelerator(
    captures: bool,
    engine: Engine,
    words: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a whole turn, as they are and captured; the host searches and waits in each layer."""
    transfers = engine.cache.transfers
    by_kernels = DeviceSearch(
        KernelAttention(transfers, ROTATIONS), DeviceCodes(transfers, 1 << 30), InFlight(transfers)
    )
    forward, waits = engine.forward, list[list[str]]()

    def watch(residents: Any, token_ids: Tensor, *rest: Any, **named: Any) -> Tensor:
        if residents[0].session.find_retriever() is None:
            return forward(residents, token_ids, *rest, **named)
        with WaitCounter() as mode:
            logits = forward(residents, token_ids, *rest, **named)
        waits.append(mode.waits)
        return logits

    monkeypatch.setattr(engine, "forward", watch)
    said = []
    for search in (None, by_kernels):
        engine.on_device = search
        engine.decoder = None
        if search is not None and captures:
            engine.decoder = CapturedSteps(engine.model.forward, lambda work: work, 16)
        resident = opened(engine, f"by {search}", method="icecache")
        done = turn(engine, resident, words(70))
        said.append((list(done.token_ids), done.retrieval.rows))
        engine.swap_out(resident.session)
    by_host, on_device = waits[: len(waits) // 2], waits[len(waits) // 2 :]
    assert said[0] == said[1]
    assert said[0][1] > 0
    assert all(by_host)
    assert not any(on_device)


REPAIRS = [
    {"swap": True},
    {"select": "bursts"},
    {"select": "bursts", "contrast": 0},
    {},
]


@pytest.mark.parametrize("settings", REPAIRS, ids=json.dumps)
@pytest.mark.parametrize("room", [1 << 30, 0])
def test_repairs_run_on_an_accelerator(
    settings: dict[str, Any], room: int, engine: Engine, words: Callable[..., str]
) -> None:
    """Over a copy of the rows in host memory, and over their pages without room for it."""
    assert engine.store.memory is not None
    engine.store.memory.limit_bytes = room
    resident = opened(engine, repair_rows=12, repair_settings=json.dumps(settings))
    turn(engine, resident, words(120))
    request = pb.RepairRequest(session="s", epoch=1, trigger="tool_result", text=words(9, seed=1))
    steps = run_pause_repair(engine, resident, request, lambda: False)
    result = run(engine, resident, steps)
    assert result.report.promoted
    turn(engine, resident, words(30, seed=2), repair=True)
    engine.cache.check_integrity()


@pytest.mark.parametrize("rank", ["key_difference", "attention"])
@pytest.mark.parametrize("by_prefill", [False, True])
def test_episodes_are_built_and_switched_on_an_accelerator(
    rank: str, by_prefill: bool, engine: Engine, words: Callable[..., str]
) -> None:
    settings = json.dumps({"rank": rank, "whole_tokens": rank == "key_difference", "pool": 3})
    resident = opened(engine, method="epicache", method_settings=settings)
    said = turn(engine, resident, words(120)).token_ids
    length = resident.session.length
    plans = [
        pb.EpisodePlan(
            id=name,
            patched_prompt=said[start : start + 20],
            segments=[pb.Span(start=start, stop=start + 40, similarity=1.0)],
        )
        for name, start in (("e_0", 0), ("e_1", 60))
    ]
    request = pb.BuildEpisodesRequest(
        session="s", epoch=1, plans=plans, token_ids=said[:length] if by_prefill else []
    )
    built = run(engine, resident, run_build(engine, resident, request)).episodes
    resident = engine.swap_in(resident.session)
    for episode in built:
        done = turn(engine, resident, words(20, seed=3), episode=episode)
        assert done.switched.episode == episode.id
    engine.cache.check_integrity()


def test_opens_forks_rebuilds_and_prefixes_run_on_an_accelerator(
    engine: Engine, words: Callable[..., str], lose_page: Callable[..., None]
) -> None:
    resident = opened(engine, repair_rows=12)
    first = turn(engine, resident, words(150))
    logged = pb.LoggedTurn(
        token_ids=first.token_ids,
        prompt_tokens=first.prompt_tokens,
        output_tokens=first.output_tokens,
        unsettled_tokens=first.state.unsettled,
    )
    spec = pb.SessionSpec(
        session="s", epoch=2, budget=60, method="snapkv", repair_rows=12, method_settings="{}"
    )
    child = pb.SessionSpec()
    child.CopyFrom(spec)
    child.session = "replayed"
    request = pb.ForkRequest(spec=child, turns=[logged], page_ids=first.state.page_ids)
    replayed = engine.create_empty(child, pb.SessionState())
    engine.swap_out(resident.session)
    slot = engine.swap_in(replayed)
    run(engine, slot, run_fork(engine, slot, request))
    engine.discard(replayed)
    reopened = engine.create_empty(spec, first.state)
    run(engine, None, run_open(engine, reopened, pb.OpenRequest(spec=spec, state=first.state)))
    lose_page(engine.store, "s", 1)
    spec.epoch = 3
    emptied = engine.swap_in(engine.create_empty(spec, first.state))
    rebuild = pb.RebuildRequest(spec=spec, state=first.state, turns=[logged])
    assert run(engine, emptied, run_rebuild(engine, emptied, rebuild)).pages == 1
    sharing = opened(engine, "sharing", method="full", budget=256)
    assert turn(engine, sharing, words(150)).shared_pages >= 1
