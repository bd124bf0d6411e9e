"""A run: ann's answers of an undisturbed service, then the doors under attack while she talks."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx

from benchmarks.fuzz import neighbour
from benchmarks.fuzz.attack import attack
from benchmarks.fuzz.cases.http_requests import ROUTES, http_requests
from benchmarks.fuzz.cases.openapi import DOOR as OPENAPI
from benchmarks.fuzz.cases.openapi import openapi_requests
from benchmarks.fuzz.cleaning import clean
from benchmarks.fuzz.doors.base import Door
from benchmarks.fuzz.doors.calls import CallSender, call_requests
from benchmarks.fuzz.doors.http import HttpSender
from benchmarks.fuzz.doors.wire import check_refused, check_worker_call
from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.neighbour import Conversation, Neighbour
from benchmarks.fuzz.replies import Checker
from benchmarks.fuzz.service import ANN, MALLORY, WIRE_TOKEN, Service, running_service
from benchmarks.fuzz.watch import Watch
from benchmarks.fuzz.world import World
from faults.rig.processes import QUIET
from faults.rig.setups import Rig
from faults.rig.zygote import Zygote
from kvrecall.protocol.sessions_v1 import sessions_pb2
from kvrecall.protocol.v1 import TOKEN_KEY, worker_pb2

DOORS = (*ROUTES, OPENAPI, "grpc", "worker", "worker without token")
# Threads that attack at once, each one door at a time.
AT_ONCE = 3
# A call with the token may ask a worker for more than any gateway does: it is left after this.
_WIRE_SECONDS = 20.0


@dataclass(frozen=True)
class Plan:
    """Seed, doors, requests of a door in one visit, and visits of each door.

    Without `visits` the doors are visited again and again for so many `minutes`.
    """

    seed: int
    doors: Sequence[str] = DOORS
    examples: int = 60
    conversations: int = 6
    visits: int | None = None
    minutes: float = 60.0


@contextmanager
def open_rig() -> Iterator[Rig]:
    """The reference model, and a zygote that starts processes quickly."""
    zygote = Zygote(QUIET)
    try:
        yield Rig(Path("reference"), zygote)
    finally:
        zygote.close()


def run(plan: Plan, folder: Path) -> Findings:
    """Run a plan; the processes' files and logs are in `folder`."""
    conversations = neighbour.build_conversations(plan.seed, plan.conversations)
    findings = Findings()
    with open_rig() as rig:
        with running_service(folder / "undisturbed", rig) as calm:
            client = Neighbour(calm.url, calm.keys[ANN])
            undisturbed = [client.hold(each) for each in conversations]
            client.close()
        with running_service(folder / "attacked", rig) as service:
            watch = Watch(service, findings)
            watch.start()
            try:
                _attack(plan, service, watch, conversations, undisturbed, findings)
            finally:
                watch.stop()
    return findings


def _attack(
    plan: Plan,
    service: Service,
    watch: Watch,
    conversations: Sequence[Conversation],
    undisturbed: Sequence[Sequence[str]],
    findings: Findings,
) -> None:
    """Attack the doors, several at once, while ann talks."""
    world = World()
    over = threading.Event()
    until = time.monotonic() + 60 * plan.minutes

    def goes_on() -> bool:
        return watch.alive and (plan.visits is not None or time.monotonic() < until)

    ann = Neighbour(service.url, service.keys[ANN], world.add_foreign)
    talking = threading.Thread(
        target=neighbour.talk,
        args=(ann, conversations, undisturbed, findings, lambda: not over.is_set()),
    )
    talking.start()
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for visit in count() if plan.visits is None else range(plan.visits):
                visits = [
                    pool.submit(_visit, plan, service, world, name, visit, findings, goes_on)
                    for name in plan.doors
                ]
                for each in visits:
                    each.result()
                if not goes_on():
                    break
                clean(service, findings)
    finally:
        over.set()
        talking.join()
        ann.close()


def _visit(
    plan: Plan,
    service: Service,
    world: World,
    name: str,
    visit: int,
    findings: Findings,
    goes_on: Callable[[], bool],
) -> None:
    """Attack one door with a seed of its own."""
    seed = plan.seed * 1_000_000 + visit * 1_000 + DOORS.index(name)
    secrets = [neighbour.SECRET.format(number) for number in range(plan.conversations)]
    with ExitStack() as stack:
        door = open_door(name, service, world, secrets, stack)
        attack(door, seed, plan.examples, findings, goes_on)


def open_door(
    name: str, service: Service, world: World, secrets: Sequence[str], stack: ExitStack
) -> Door:
    """Open a door; `stack` closes its connections."""
    if name in ("worker", "worker without token"):
        return _open_wire(name, service, world, stack)
    checker = Checker(secrets)
    key = service.keys[MALLORY]
    if name == "grpc":
        calls = CallSender(service.grpc, (("authorization", f"Bearer {key}"),))
        stack.callback(calls.close)
        api = sessions_pb2.DESCRIPTOR.services_by_name["Sessions"]
        return Door(name, call_requests(name, api, world.resolve), calls.send, checker.check_call)
    sender = HttpSender(service.url, key, world)
    stack.callback(sender.close)
    if name == OPENAPI:
        description = httpx.get(f"{service.url}/openapi.json", timeout=60).json()
        requests = openapi_requests(description, service.url)
    else:
        requests = http_requests(name)
    return Door(name, requests, sender.send, checker.check_http)


def _open_wire(name: str, service: Service, world: World, stack: ExitStack) -> Door:
    """Open a worker's own port, with or without the token of its gateways."""
    known = name == "worker"
    metadata = ((TOKEN_KEY, WIRE_TOKEN),) if known else ()
    calls = CallSender(service.workers[0], metadata, _WIRE_SECONDS)
    stack.callback(calls.close)
    wire = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
    # Ids of the gateway's sessions stay its own: who has the token may write them.
    requests = call_requests(name, wire, _own_ids)
    return Door(name, requests, calls.send, check_worker_call if known else check_refused)


def _own_ids(text: str) -> str:
    return text.replace("@", "fuzz-").replace(":", "-")
