"""An agent's session of 24 turns with tool pauses through kvrecall and its peers, one by one.

`python -m benchmarks peers`. All peers hold the same generated session on the same weights, each
with its own replies, on as many threads: transformers, llama.cpp, kvpress and kvrecall, each in a
server process of its own that is killed in the middle of the session and at its end. Environments
of peers are made at first use, in `runs/peers/`; a peer that has run is not run again, so that an
interrupted run goes on (`--again` begins anew). A peer that cannot run here has a row that says why.
The result file goes to `benchmarks/results/`.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from benchmarks.benchmark import Benchmark, Measured
from benchmarks.options import option
from benchmarks.peers.agent.journal import PeerRun, find_run, store_run
from benchmarks.peers.agent.rows import describe, result_rows
from benchmarks.peers.agent.session import run_session
from benchmarks.peers.agent.tables import build_tables
from benchmarks.peers.conversation import generate
from benchmarks.peers.errors import PeerFailed
from benchmarks.peers.plan import Plan
from benchmarks.peers.subjects.base import ROOT
from benchmarks.peers.subjects.registry import FULL, KEPT, Build, Setting, list_peers
from evals.languages.choice import get_language
from kvrecall_server.app.models import find_gguf, resolve_model
from workers.model.tokenizer import load_tokenizer

RUNS = ROOT / "runs" / "peers"


@dataclass(frozen=True)
class Options:
    """The session, and which peers hold it."""

    model: str = "smollm2"
    data: tuple[Path, ...] = option((), "small talk")
    seed: int = 7300
    turns: int = 24
    tokens: int = option(7500, "length of the session")
    reply_tokens: int = 20
    pause: float = option(2.0, "seconds of a tool's pause")
    threads: int = 2
    peers: tuple[str, ...] = option((), "only those with one of these in a name")
    again: bool = option(False, "run peers that have run again")
    runs: Path = option(RUNS, "folder of environments and runs")
    kvpress: Path = option(ROOT / "benchmarks" / "peers" / ".venv", "environment")


def measure(given: Options) -> Measured:
    """Run the session with all peers."""
    plan = Plan(
        given.model,
        tuple(str(path) for path in given.data),
        given.seed,
        given.turns,
        given.tokens,
        given.reply_tokens,
        given.pause,
        given.threads,
    )
    setting = open_setting(plan, given.kvpress, given.runs)
    runs = run_peers(plan, setting, given.peers, given.runs, given.again)
    rows = result_rows(runs, plan, KEPT, FULL)
    print(build_tables(rows), flush=True)
    return Measured(
        f"peers-{Path(given.model).stem}.json",
        given.model,
        rows,
        plan.seed,
        {f"{run.peer}: {each}": text for run in runs for each, text in run.versions.items()},
        {"threads": plan.threads},
    )


def open_setting(plan: Plan, kvpress: Path, runs: Path) -> Setting:
    """Resolve the model; its GGUF file is converted at first use. Raises ModelRefused."""
    folder = resolve_model(plan.model)
    ends: Any = GenerationConfig.from_pretrained(folder).eos_token_id
    tokenizer = load_tokenizer(folder, ends if isinstance(ends, list) else [ends])
    environments = runs.resolve() / "environments"
    return Setting(folder, find_gguf(plan.model), tokenizer, kvpress.resolve(), environments)


def run_peers(
    plan: Plan, setting: Setting, wanted: Sequence[str], runs: Path, again: bool
) -> list[PeerRun]:
    """Runs of all peers with one of `wanted` in their names, from the journal or made here."""
    found = list[PeerRun]()
    for name, build in list_peers(plan, setting).items():
        if wanted and not any(part in name for part in wanted):
            continue
        run = None if again else find_run(runs, plan, name)
        if run is None:
            run = run_peer(plan, setting, name, build)
            if run.not_run is None:
                store_run(runs, plan, run)
        found.append(run)
    return found


def run_peer(plan: Plan, setting: Setting, name: str, build: Build) -> PeerRun:
    """Run a peer's session, with a line of output for each turn."""
    language = get_language(setting.folder, plan.data)
    conversation = generate(language, plan.seed, plan.turns, plan.tokens, plan.reply_tokens)
    turns = []
    with tempfile.TemporaryDirectory(prefix="kvrecall-peers-") as folder:
        try:
            peer = build(Path(folder))
        except PeerFailed as error:
            return PeerRun(name, (), {}, str(error))
        try:
            for turn in run_session(peer, conversation, plan, language.is_answer):
                turns.append(turn)
                print(
                    f"{name}: turn {turn.number}, {turn.length} tokens, first token after "
                    f"{turn.first_token:.2f} s, {'right' if turn.right else 'wrong'}: {turn.text!r}",
                    flush=True,
                )
        except PeerFailed as error:
            return PeerRun(name, (), {}, str(error))
        finally:
            peer.kill()
        return PeerRun(name, tuple(turns), peer.versions)


BENCHMARK = Benchmark(
    "peers",
    "an agent's session beside transformers, llama.cpp and kvpress",
    Options,
    measure,
    describe,
)
