"""A model whose layers lie on two devices, which are made up: its answers, and where its memory is."""

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model  # type: ignore[import-untyped]

from evals.replay_session import run_steps
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.app.wiring import build_state_store, build_store
from reference import MODEL_PATH
from tests.workers.devices.two_devices import DevicesDiffer, TwoDevices
from tests.workers.model.architectures.architecture import Architecture
from tests.workers.model.architectures.building import build
from tests.workers.model.architectures.family import words
from tests.workers.model.architectures.full_attention import DENSE
from tests.workers.model.architectures.latent import LATENTS
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED
from workers.engine.engine import Engine, Parts
from workers.engine.settings import WorkerSettings
from workers.errors import BadSettings
from workers.model.loader import LoadedModel, adopt
from workers.model.tokenizer import load_tokenizer
from workers.tasks.settle import run_settle
from workers.tasks.turn import run_turn

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
FAMILIES = {
    "qwen3": replace(DENSE["qwen3"], layers=4),
    "gpt_oss": WINDOWED["gpt_oss"],
    "deepseek_v3": LATENTS["deepseek_v3"],
    "qwen3_5": RECURRENT["qwen3_5_text"],
}
CASES = [
    *(("qwen3", method) for method in ("full", "snapkv", "h2o", "icecache")),
    *(
        (name, method)
        for name in ("gpt_oss", "deepseek_v3", "qwen3_5")
        for method in ("full", "icecache")
    ),
]


def load(architecture: Architecture, *, divided: bool) -> LoadedModel:
    """Load a tiny model, on the CPU or with half of its layers on each device."""
    module = build(architecture)
    module.set_experts_implementation("eager")  # the other one asks the GPU what it can do
    if divided:
        half = architecture.layers // 2
        later = {f"model.layers.{i}": SECOND for i in range(half, architecture.layers)}
        parts = {f"model.{name}": FIRST for name, _ in module.model.named_children()}
        del parts["model.layers"]
        first = {f"model.layers.{i}": FIRST for i in range(half)}
        places = {**parts, **first, **later, "model.norm": SECOND, "lm_head": SECOND}
        module = dispatch_model(module, places)
    return adopt(module)


def open_engine(stack: ExitStack, model: LoadedModel, folder: Path) -> Engine:
    """Open an engine that the test's own thread runs."""
    store = stack.enter_context(closing(build_store(model, folder, 1 << 28)))
    states = build_state_store(model, folder, 1 << 28)
    if states is not None:
        stack.enter_context(closing(states))
    limits = WorkerSettings(slots=2, max_budget=640, block_tokens=64, native_attention=False)
    tokenizer = load_tokenizer(MODEL_PATH, (1,))
    return stack.enter_context(
        closing(Engine(Parts(model, tokenizer, store, limits, states=states)))
    )


def talk(engine: Engine, method: str) -> list[int]:
    """Run three turns with a pause and a repair, the last one in a slot that is filled anew."""
    spec = pb.SessionSpec(
        session=method,
        epoch=1,
        budget=640 if method == "full" else 128,
        method=method,
        method_settings="{}",
        repair_rows=0 if method == "full" else 16,
    )
    resident = engine.swap_in(engine.open(spec, pb.SessionState()))
    token_ids = list[int]()
    for number in range(3):
        if number == 2:
            engine.swap_out(resident.session)
            resident = engine.swap_in(resident.session)
        request = pb.TurnRequest(
            session=method,
            epoch=1,
            messages=[pb.Message(role="user", content=words(50, number))],
            generate=True,
            repair=method != "full",
            sampling=pb.Sampling(max_tokens=6),
        )
        done = run_steps(engine, resident, run_turn(engine, resident, request, lambda _: None))
        run_steps(engine, resident, run_settle(engine, resident))
        token_ids += done.token_ids
    engine.cache.check_integrity()
    assert engine.cache.holds_all(resident.slot, resident.session.length) == (method == "full")
    return token_ids


@pytest.mark.parametrize(("name", "method"), CASES)
def test_a_divided_model_answers_as_a_whole_one(name: str, method: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        model = load(FAMILIES[name], divided=False)
        expected = talk(open_engine(stack, model, tmp_path / "whole"), method)
    with TwoDevices(), ExitStack() as stack:
        model = load(FAMILIES[name], divided=True)
        half = FAMILIES[name].layers // 2
        assert model.devices == (FIRST,) * half + (SECOND,) * half
        assert talk(open_engine(stack, model, tmp_path / "divided"), method) == expected


def test_each_layers_memory_is_on_its_device(tmp_path: Path) -> None:
    """Of a hybrid, and of one with windows: rows, states and windows."""
    with TwoDevices(), ExitStack() as stack:
        hybrid = open_engine(stack, load(FAMILIES["qwen3_5"], divided=True), tmp_path / "hybrid")
        windowed = open_engine(stack, load(FAMILIES["gpt_oss"], divided=True), tmp_path / "windows")
        states = hybrid.caches.side
        windows = windowed.caches.side
        assert states is not None
        assert states.states is not None
        assert windows is not None
        assert windows.windows is not None
        for cache in (hybrid.cache, windowed.cache, windows.windows):
            assert [memory.device for memory in cache.pool.memories] == [FIRST, SECOND]
            assert cache.pool.home == [0, 1], "of four layers, every second one has such rows"
            # Each device has the memory of its own layers alone.
            assert len({memory.keys.shape for memory in cache.pool.memories}) == 1
        assert {part.device for part in states.states._pool} == {FIRST, SECOND}
        for model in (hybrid.model, windowed.model):
            parts = [model.get_side_bytes(64, [device]) for device in (FIRST, SECOND)]
            assert parts == [model.get_side_bytes(64) // 2] * 2
            assert [model.count_row_layers([device]) for device in (FIRST, SECOND)] == [1, 1]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_memory_on_one_device_would_be_noticed(name: str, tmp_path: Path) -> None:
    with TwoDevices(), ExitStack() as stack:
        model = load(FAMILIES[name], divided=True)
        engine = open_engine(stack, replace(model, devices=(FIRST,) * 4), tmp_path)
        with pytest.raises(DevicesDiffer):
            talk(engine, "full")


def test_a_budget_that_one_device_has_no_room_for_is_refused(tmp_path: Path) -> None:
    """Of a method that gives the first layers most rows: they are all on one device."""
    with TwoDevices(), ExitStack() as stack:
        model = load(FAMILIES["qwen3"], divided=True)
        engine = open_engine(stack, model, tmp_path)
        slot = engine.settings.slot_rows
        assert engine.cache.has_room([slot + 8, slot - 8, slot, slot])
        assert not engine.cache.has_room([slot + 8, slot, slot - 8, slot])
        spec = pb.SessionSpec(session="s", epoch=1, budget=600, method="pyramidkv")
        with pytest.raises(BadSettings, match="layers of one device"):
            engine.open(spec, pb.SessionState())
