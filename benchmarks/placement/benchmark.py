"""Where sessions go: a recorded trace, simulated on many workers, by the placement of the gateways and by others.

`python -m benchmarks placement --traces FOLDER` plays Mooncake's conversation trace (`conversation_trace.jsonl`, FAST
2025, in its repository under `FAST25-release/traces`): the time of each request, its tokens, and ids of its prompt's
blocks of 512 tokens. It is replicated until it has `--sessions` sessions, each copy with prompts of its own. The
policy "present" is the code of `services.cluster`, with a pool for each gateway. In the trace all sessions of a copy
have their first block in common; `--beginnings` puts more blocks before every prompt, as tools and system messages
are, in `--families` families of each copy. The cost model has four rates:
a prompt's tokens in RAM cost nothing, those in a worker's files and in the tier that all share are read, and
the rest is computed, one prompt at a time. Decoding holds a slot. The first half of the time is for tuning
and the second is held out.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.benchmark import BadOptions, Benchmark, Measured
from benchmarks.options import option
from benchmarks.placement.cost import Cost
from benchmarks.placement.lru import Blocks
from benchmarks.placement.policies import POLICIES
from benchmarks.placement.simulation import Simulation
from benchmarks.placement.summary import Summary
from benchmarks.placement.traces import FILE, Turn, lengthen, multiply, read_trace, split
from benchmarks.placement.worker import Worker
from kvrecall_server.reporting.results import Row


@dataclass(frozen=True)
class Plan:
    """Sizes of a simulation."""

    traces: str = option("", f"folder with {FILE}")
    seed: int = 7700
    workers: int = 50
    sessions: int = 100_000
    gateways: int = 4
    slots: int = option(32, "of a worker")
    pace: float = option(0.5, "factor of the trace's pace")
    beginnings: tuple[int, ...] = option((0, 16), "blocks that families begin with")
    families: int = option(16, "prompt families of a copy of the trace")
    prefill_rate: float = option(8_000.0, "tokens a second that a worker prefills")
    files_rate: float = option(24_000.0, "tokens a second that it reads from its files")
    shared_rate: float = option(12_000.0, "tokens a second that it reads from the shared tier")
    step_seconds: float = option(0.025, "seconds of a decoding step")
    ram_blocks: int = option(2_000, "blocks in a worker's RAM")
    files_blocks: int = option(16_000, "blocks in its files")
    policies: tuple[str, ...] = option(tuple(POLICIES), "policies", tuple(POLICIES))


def measure(plan: Plan) -> Measured:
    """Simulate every policy. Raises BadOptions without a trace."""
    if not (Path(plan.traces) / FILE).is_file():
        raise BadOptions(f"--traces needs a folder with {FILE}")
    turns = multiply(read_trace(Path(plan.traces)), plan.sessions, random.Random(plan.seed))
    return Measured("placement.json", "none", simulate(turns, plan), plan.seed)


def simulate(turns: Sequence[Turn], plan: Plan) -> Iterator[Row]:
    """Simulate each length of the beginnings by each policy."""
    played = [turn.sped_up(plan.pace) for turn in turns]
    for blocks in plan.beginnings:
        longer = lengthen(played, blocks, plan.families)
        for name in plan.policies:
            yield from play(name, longer, plan, f"{blocks} blocks")


def play(name: str, turns: Sequence[Turn], plan: Plan, begin: str) -> Iterator[Row]:
    """Play the turns by one policy; the rows of both halves, whose conditions begin with `begin`."""
    workers = build_workers(plan)
    policy = POLICIES[name](workers, random.Random(plan.seed), plan.gateways)
    middle = split(turns)
    halves = {False: Summary(plan.workers), True: Summary(plan.workers)}
    for turn, served in Simulation(policy, workers).run(turns):
        halves[turn.at >= middle].add(turn, served)
    for held_out, summary in halves.items():
        half = "held out" if held_out else "tuning"
        yield summary.build_row(f"{begin}, {half}: {name}")


def build_workers(plan: Plan) -> list[Worker]:
    """Build workers that have computed nothing."""
    cost = Cost(plan.prefill_rate, plan.files_rate, plan.shared_rate, plan.step_seconds)
    shared = set[int]()
    return [
        Worker(
            f"worker-{number}",
            cost,
            Blocks(plan.ram_blocks),
            Blocks(plan.files_blocks),
            shared,
            plan.slots,
        )
        for number in range(plan.workers)
    ]


def describe(row: Row) -> str:
    """A row as a line of text."""
    return (
        f"{row['condition']:<70} RAM {row['ram_share']:.3f} files {row['files_share']:.3f} shared "
        f"{row['shared_share']:.3f}  computed {row['computed_tokens']:,}  first token {row['median']:.2f} s "
        f"(p95 {row['p95']:.2f})  p99/mean busy {row['imbalance']:.2f}, busy {row['busy_share']:.2f}, "
        f"moves {row['moves']}"
    )


BENCHMARK = Benchmark(
    "placement",
    "where sessions go, on a recorded trace with 100,000 sessions",
    Plan,
    measure,
    describe,
)
