"""All peers by name, each with what starts it."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.environments import kvpress_python, llama_server_python, node_folder
from benchmarks.peers.errors import PeerFailed
from benchmarks.peers.plan import Plan
from benchmarks.peers.subjects.base import ROOT, Peer
from benchmarks.peers.subjects.gguf_f16 import find_float16
from benchmarks.peers.subjects.kvrecall_service import KvrecallService
from benchmarks.peers.subjects.llama_http import LlamaServer
from benchmarks.peers.subjects.token_process import TokenProcess
from kvrecall.client import SessionOptions
from workers.model.tokenizer import ChatTokenizer

PREFILL = "transformers, prefill every turn"
KEPT = "transformers, cache kept"
FULL = "kvrecall, full cache"
_PROGRAMS = ROOT / "benchmarks" / "peers" / "programs"
_SHARES = (4, 8)
# When sessions are repaired: unless they name it before answers as well.
_IN_PAUSES: SessionOptions = {
    "research": {"method": "snapkv", "repair_on": ["tool_call", "tool_delta", "tool_result"]}
}
_BEFORE_ANSWERS: SessionOptions = {"research": {"method": "snapkv"}}
# Every token of a reply finds its rows.
_RETRIEVAL: SessionOptions = {"recall": True}
_NOTHING: SessionOptions = {}
_PAUSES: SessionOptions = {"research": {"repair_rows": 128}}


@dataclass(frozen=True)
class Setting:
    """Where peers find what they need.

    Attributes:
        folder: Model as transformers loads it.
        gguf: The file that it was converted from, if it was.
        tokenizer: Its tokenizer and chat template.
        kvpress: Environment with kvpress.
        environments: Folder of the other environments.
    """

    folder: str
    gguf: Path | None
    tokenizer: ChatTokenizer
    kvpress: Path
    environments: Path


# Builds a peer whose files are in a folder of its own.
Build = Callable[[Path], Peer]


def list_peers(plan: Plan, setting: Setting) -> Mapping[str, Build]:
    """All peers in the order in which they run. A build raises PeerFailed."""
    peers: dict[str, Build] = {
        FULL: lambda folder: _kvrecall(plan, folder, plan.capacity, _full_options(plan), None),
        KEPT: lambda _: _transformers(plan, setting, "kept"),
        PREFILL: lambda _: _transformers(plan, setting, "each-turn"),
        "llama.cpp, float16": lambda _: _llama_node(plan, setting, float16=True),
        "llama.cpp, 4 bits": lambda _: _llama_node(plan, setting, float16=False),
        "llama.cpp server (AVX2 wheel), 4 bits": lambda folder: _llama_server(
            plan, setting, folder, save_slot=False
        ),
        "llama.cpp server (AVX2 wheel), 4 bits, slot saved": lambda folder: _llama_server(
            plan, setting, folder, save_slot=True
        ),
    }
    peers["kvrecall, 4 bits, full cache"] = lambda folder: _kvrecall(
        plan, folder, plan.capacity, _full_options(plan), None, "int4"
    )
    peers["kvrecall, 4 bits, nothing named"] = _kvrecall_in(plan, None, _NOTHING, "int4")
    peers["kvrecall, nothing named"] = _kvrecall_in(plan, None, _NOTHING)
    peers["kvrecall, nothing named but repairs"] = _kvrecall_in(plan, None, _PAUSES)
    for share in _SHARES:
        rows = plan.budget(share)
        peers[f"kvrecall, 1/{share}, repair in pauses"] = _kvrecall_in(plan, rows, _IN_PAUSES)
        peers[f"kvrecall, 1/{share}, repair in pauses and before answers"] = _kvrecall_in(
            plan, rows, _BEFORE_ANSWERS
        )
        peers[f"kvrecall, 1/{share}, retrieval"] = _kvrecall_in(plan, rows, _RETRIEVAL)
        peers[f"kvpress snapkv, 1/{share}"] = _kvpress_in(plan, setting, rows)
    return peers


def _kvrecall_in(
    plan: Plan, rows: int | None, options: SessionOptions, quantize: str | None = None
) -> Build:
    named: SessionOptions = {"budget": rows, **options}
    return lambda folder: _kvrecall(plan, folder, rows, named, plan.pause, quantize)


def _kvpress_in(plan: Plan, setting: Setting, rows: int) -> Build:
    return lambda _: _kvpress(plan, setting, rows)


def _full_options(plan: Plan) -> SessionOptions:
    return {
        "recall": False,
        "budget": plan.capacity,
    }


def _kvrecall(
    plan: Plan,
    folder: Path,
    rows: int | None,
    options: SessionOptions,
    pause: float | None,
    quantize: str | None = None,
) -> Peer:
    seeded: SessionOptions = {**options, "seed": plan.seed}
    return KvrecallService(plan.model, folder, plan.threads, rows, seeded, pause, quantize)


def _transformers(plan: Plan, setting: Setting, mode: str) -> Peer:
    program = [sys.executable, "-m", "benchmarks.peers.programs.transformers_chat"]
    command = [*program, setting.folder, str(plan.threads), mode]
    return TokenProcess(command, ROOT, plan.threads, setting.tokenizer)


def _kvpress(plan: Plan, setting: Setting, rows: int) -> Peer:
    python = kvpress_python(setting.kvpress)
    program = [str(python), "-m", "benchmarks.peers.programs.kvpress_chat", setting.folder]
    command = [*program, str(plan.threads), str(rows), "SnapKVPress"]
    return TokenProcess(command, ROOT, plan.threads, setting.tokenizer)


def _llama_node(plan: Plan, setting: Setting, *, float16: bool) -> Peer:
    file = _gguf(setting)
    if float16:
        file = find_float16(file, setting.environments)
    at = node_folder(setting.environments / "node")
    program = ["node", str(_PROGRAMS / "llama_node.mjs"), str(file)]
    command = [*program, str(plan.threads), str(plan.capacity)]
    return TokenProcess(command, at, plan.threads, setting.tokenizer)


def _llama_server(plan: Plan, setting: Setting, folder: Path, *, save_slot: bool) -> Peer:
    file = _gguf(setting)
    python = llama_server_python(setting.environments / "llama")
    slots = f"{folder}/" if save_slot else ""
    program = [str(python), str(_PROGRAMS / "llama_server.py"), str(file)]
    command = [*program, str(plan.threads), str(plan.capacity), slots]
    return LlamaServer(command, plan.threads, setting.tokenizer, save_slot)


def _gguf(setting: Setting) -> Path:
    if setting.gguf is None:
        raise PeerFailed("the model is no GGUF file, which llama.cpp needs")
    return setting.gguf
