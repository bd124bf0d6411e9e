"""Policies: which worker a turn goes to. All but two are made of the functions of services.cluster."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol, cast

from benchmarks.placement.traces import Turn
from benchmarks.placement.worker import Worker
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.cluster.grpc_client import GrpcWorkerClient
from services.cluster.membership import Membership, Node
from services.cluster.placement import Candidate, choose, find_takers, score
from services.cluster.pool import WorkerPool
from services.cluster.registry import StaticRegistry
from services.cluster.settings import WireSettings

# Blocks of a prompt that its hash is made of: the system prompt's and the first of its own.
PREFIX_BLOCKS = 2
# The bound of the former rule: so many times a worker's share of the turns, and so many more.
FORMER_FACTOR = 1.25
FORMER_SPARE_TURNS = 2


class Policy(Protocol):
    """A policy in one simulation."""

    def place(self, turn: Turn, owner: str) -> str:
        """Choose the worker of a turn that begins; `owner` has served the session's last one."""
        ...

    def end(self, turn: Turn) -> None:
        """Note the end of a turn."""
        ...


Make = Callable[[Sequence[Worker], random.Random, int], Policy]
"""Makes a policy for workers, with a source of randomness and a number of gateways."""


@dataclass
class Stateless:
    """A policy that is a function of the turn and of its owner."""

    choose: Callable[[Turn, str], str]

    def place(self, turn: Turn, owner: str) -> str:
        """See `Policy.place`."""
        return self.choose(turn, owner)

    def end(self, turn: Turn) -> None:
        """See `Policy.end`."""


@dataclass
class Present:
    """Gateways as they are: each has a pool of its own, and counts the turns that it runs itself."""

    pools: Sequence[WorkerPool]
    rng: random.Random
    _running: dict[int, ExitStack] = field(default_factory=dict)

    def place(self, turn: Turn, owner: str) -> str:
        """See `Policy.place`."""
        pool = self.rng.choice(self.pools)
        session = f"s_{turn.session}"
        chosen = pool.choose_worker(session, owner, family=get_family(turn))
        running = self._running[turn.session] = ExitStack()
        running.enter_context(pool.count_turn(session))
        return chosen

    def end(self, turn: Turn) -> None:
        """See `Policy.end`."""
        self._running.pop(turn.session).close()


@dataclass
class Proposed:
    """Rules that gateways do not have, each gateway with the turns that it runs itself.

    Attributes:
        workers: All workers by name.
        running: For each gateway the turns in each worker.
        rng: Chooses the gateway of a turn.
        longest: A new session goes where the longest part of its prefix is in RAM, among the workers that
            take sessions; gateways know no worker's RAM, so this is more than they could do.
        moves: A session whose worker takes none moves before its next turn, as a new one.
        find: Finds the workers that take sessions.
    """

    workers: Mapping[str, Worker]
    running: Sequence[Counter[str]]
    rng: random.Random
    longest: bool
    moves: bool
    find: Callable[[Iterable[Candidate]], list[Candidate]] = find_takers
    _turns: dict[int, tuple[Counter[str], str]] = field(default_factory=dict)

    def place(self, turn: Turn, owner: str) -> str:
        """See `Policy.place`."""
        running = self.rng.choice(self.running)
        chosen = owner
        if not owner or self.moves:
            takers = self.find(
                Candidate(each.name, each.slots, running[each.name])
                for each in self.workers.values()
            )
            if all(each.name != owner for each in takers):
                chosen = self._choose(turn, takers)
        running[chosen] += 1
        self._turns[turn.session] = running, chosen
        return chosen

    def end(self, turn: Turn) -> None:
        """See `Policy.end`."""
        running, chosen = self._turns.pop(turn.session)
        running[chosen] -= 1

    def _choose(self, turn: Turn, takers: Sequence[Candidate]) -> str:
        family = get_family(turn)

        def rank(each: Candidate) -> tuple[int, float]:
            held = self.workers[each.name].count_held(turn.blocks) if self.longest else 0
            return held, score(family, each.name, each.weight)

        return max(takers, key=rank).name


def get_family(turn: Turn) -> str:
    """The prompt family of a turn: by the block that all sessions of a copy of the trace begin with."""
    return f"family {turn.blocks[0]}"


def make_round_robin(workers: Sequence[Worker], rng: random.Random, gateways: int) -> Policy:
    """Make a policy that sends each turn to the next worker."""
    numbers = count()
    return Stateless(lambda _turn, _owner: workers[next(numbers) % len(workers)].name)


def make_hash_of_session(workers: Sequence[Worker], rng: random.Random, gateways: int) -> Policy:
    """Make a policy that hashes the session's id."""
    idle = _get_idle(workers)
    return Stateless(lambda turn, owner: owner or _choose(f"s_{turn.session}", idle))


def make_hash_of_prefix(workers: Sequence[Worker], rng: random.Random, gateways: int) -> Policy:
    """Make a policy that hashes the first blocks of the prompt."""
    idle = _get_idle(workers)
    return Stateless(lambda turn, _: _choose(str(turn.blocks[:PREFIX_BLOCKS]), idle))


def make_present(workers: Sequence[Worker], rng: random.Random, gateways: int) -> Policy:
    """Make the policy of the gateways as they are."""
    return Present([_build_pool(workers) for _ in range(gateways)], rng)


def make_proposed(longest: bool, moves: bool) -> Make:
    """Return a function that makes a proposed policy."""

    def make(workers: Sequence[Worker], rng: random.Random, gateways: int) -> Policy:
        by_name = {each.name: each for each in workers}
        return Proposed(by_name, [Counter() for _ in range(gateways)], rng, longest, moves)

    return make


def make_former(workers: Sequence[Worker], rng: random.Random, gateways: int) -> Policy:
    """Make the policy of gateways before 0.3.0: as they are, with turns to spare in each worker."""
    by_name = {each.name: each for each in workers}
    running = [Counter[str]() for _ in range(gateways)]
    return Proposed(by_name, running, rng, longest=False, moves=False, find=_find_former_takers)


def _find_former_takers(candidates: Iterable[Candidate]) -> list[Candidate]:
    known = list(candidates)
    turns = sum(each.turns for each in known)
    slots = sum(each.weight for each in known)
    within = [
        each
        for each in known
        if each.turns <= FORMER_FACTOR * turns * each.weight / slots + FORMER_SPARE_TURNS
    ]
    return [each for each in within if each.turns < each.slots] or within


PRESENT = "present"
FORMER = "former, with two turns to spare"
POLICIES: Mapping[str, Make] = {
    "round robin": make_round_robin,
    "hash of the session": make_hash_of_session,
    "hash of the prefix": make_hash_of_prefix,
    FORMER: make_former,
    PRESENT: make_present,
    "present, and moves off loaded workers": make_proposed(longest=False, moves=True),
    "longest prefix in RAM": make_proposed(longest=True, moves=False),
}


def _get_idle(workers: Sequence[Worker]) -> list[Candidate]:
    return [Candidate(each.name, each.slots) for each in workers]


def _choose(key: str, candidates: Sequence[Candidate]) -> str:
    chosen = choose(key, candidates)
    assert chosen is not None, "there are workers"
    return chosen


def _build_pool(workers: Sequence[Worker]) -> WorkerPool:
    """A gateway's pool of the workers; it places sessions and calls no worker."""
    no_client = cast("GrpcWorkerClient", None)
    membership = Membership(StaticRegistry(()), WireSettings())
    for each in workers:
        record = pb.WorkerRecord(name=each.name, slots=each.slots)
        membership.by_name[each.name] = Node(no_client, pb.WorkerInfo(), record)
    return WorkerPool(membership)
