"""What the tests of several ranks have a worker do; each returns JSON that does not depend on the ranks."""

import json
import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.conftest import WORDS, LocalWorker, answer_of
from workers.engine.selection import Selection
from workers.errors import WorkerError

KEY = b"k" * 32
SPARSE = json.dumps({"prefill": {"sparse": "on", "sample": 16, "band": 16, "max_density": 1}})
SWAP = json.dumps({"swap": True})
WHOLE_TOKENS = json.dumps({"whole_tokens": True})
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "default": {"method": "icecache", "budget": 96},
    "snapkv with repair": {"method": "snapkv", "budget": 112, "repair_rows": 24},
    "loopserve": {"method": "loopserve", "budget": 96, "repair_rows": 8},
    "chunkkv": {"method": "chunkkv", "budget": 96},
    "tova": {"method": "tova", "budget": 112, "repair_rows": 24, "repair_settings": SWAP},
    "h2o": {"method": "h2o", "budget": 96},
    "keydiff": {"method": "keydiff", "budget": 96, "method_settings": WHOLE_TOKENS},
    "random": {"method": "random", "budget": 96},
    "sparse prefill": {"method": "full", "options": SPARSE},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "crowd": {"slots": 2, "block_tokens": 64},
    "failure": {"slots": 2},
}


def say(count: int, seed: int = 0) -> str:
    """Say some words, the same for the same seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def describe(done: pb.TurnDone) -> dict[str, Any]:
    """Describe what a turn did: its answer, the rows it left active, and those it promoted."""
    selection = Selection.from_bytes(done.state.selection)
    return {
        "answer": answer_of(done),
        "positions": [layer.tolist() for layer in selection.positions],
        "promoted": list(done.repair.promoted),
        "durable": done.durable,
    }


def read(report: Message) -> dict[str, Any]:
    """Read a report, without its times and the stores' bytes: each rank's pages have headers."""
    found = MessageToDict(report)
    kept = {key: each for key, each in found.items() if key not in ("seconds", "tierBytes")}
    return {key: round(each, 5) if isinstance(each, float) else each for key, each in kept.items()}


def read_reports(done: pb.TurnDone) -> list[dict[str, Any]]:
    """Read what a turn reports of memory and repair, and of its capabilities."""
    reports = (done.memory, done.repair, done.reselections, done.retrieval, done.prefill)
    return [read(each) for each in reports]


def take_turns(worker: LocalWorker) -> dict[str, Any]:
    """Two turns with each method."""
    found: dict[str, Any] = {}
    for name, spec in CASES.items():
        worker.open(name, row_key=KEY, **spec)
        first = worker.turn(name, say(150))
        repairs = "repair_rows" in spec
        paused = [read(worker.repair(name, say(8, 2)).report)] if repairs else []
        second = worker.turn(name, say(30, 1), repair=repairs)
        usage = worker.scheduler.take_usage(name).result(600)
        found[name] = [describe(first), describe(second)]
        reports = [read_reports(done) for done in (first, second)]
        found[f"reports of {name}"] = [*reports, paused, read(usage)]
        found["stored"] = dict(second.memory.tier_bytes)
    return found


def crowd(worker: LocalWorker) -> dict[str, Any]:
    """More sessions at once than there are slots, over two turns, some of which are cancelled."""
    names = [f"s{number}" for number in range(5)]
    for number, name in enumerate(names):
        worker.open(name, row_key=KEY, tenant=f"t{number % 2}", **list(CASES.values())[number % 3])
    found: dict[str, Any] = {name: [] for name in names}
    for turn in range(2):
        running = {n: worker.submit(n, say(90, turn + i)) for i, n in enumerate(names)}
        found = {n: [*found[n], describe(each.result(600))] for n, each in running.items()}
    cancelled = worker.submit("s1", say(200, 9), max_tokens=64)
    other = worker.submit("s2", say(40, 10))
    cancelled.cancel()
    found["s2"].append(describe(other.result(600)))
    try:
        cancelled.result(600)
        found["cancelled"] = False
    except CancelledError:
        found["cancelled"] = True
    return found


def reopen(worker: LocalWorker) -> dict[str, Any]:
    """A session that is closed and opened as committed, one that shares its beginning, a settled one."""
    spec = CASES["default"]
    worker.open("a", row_key=KEY, **spec)
    first = worker.turn("a", say(150))
    worker.scheduler.delete(pb.DeleteRequest(session="a")).result(600)
    worker.open("a", row_key=KEY, state=first.state, **spec)
    settled = worker.scheduler.settle(pb.SettleRequest(session="a", epoch=1)).result(600)
    second = worker.turn("a", say(30, 1))
    worker.open("b", row_key=KEY, **spec)
    shared = worker.turn("b", say(150))
    memory = worker.memory("b")
    return {
        "first": describe(first),
        "second": describe(second),
        "settled": settled.settled_tokens,
        "shared pages": shared.shared_pages,
        "shared": describe(shared),
        "rows": list(memory.active_rows),
    }


def remember(worker: LocalWorker) -> dict[str, Any]:
    """Turns that see rows of another session, and the text of one whose pages are lost."""
    spec = CASES["default"]
    worker.open("earlier", row_key=KEY, **spec)
    earlier = worker.turn("earlier", say(150), generate=False)
    tokens = earlier.token_ids
    here, lost = (
        pb.Passage(page_ids=ids, start=0, stop=100, token_ids=tokens[:100])
        for ids in (earlier.state.page_ids[:32], 2 * b"lost page of 16b")
    )
    found: dict[str, Any] = {}
    worker.open("s", row_key=KEY, **spec)
    for number, passages in enumerate(([here], [lost], [lost, here])):
        done = worker.turn("s", say(30, number), remembered=passages)
        found[f"turn {number}"] = [describe(done), read(done.remembered), *read_reports(done)]
    return found


def converse(worker: LocalWorker) -> dict[str, Any]:
    """Two turns with the methods that every family is served with; the session is closed and opened between."""
    found: dict[str, Any] = {}
    for name in ("full", "default", "snapkv with repair"):
        spec = CASES[name]
        worker.open(name, row_key=KEY, **spec)
        first = worker.turn(name, say(150, 150))
        worker.scheduler.delete(pb.DeleteRequest(session=name)).result(600)
        worker.open(name, row_key=KEY, state=first.state, **spec)
        second = worker.turn(name, say(30, 30), repair="repair_rows" in spec)
        turns = [describe(each) for each in (first, second)]
        found[name] = [(each["answer"], each["positions"], each["promoted"]) for each in turns]
    return found


def fail_and_go_on(worker: LocalWorker) -> dict[str, Any]:
    """Turns that fail on one rank's disk fail as a whole, and the sessions go on once opened again.

    Two others, which need all slots behind a failure, decode together as if there had been none.
    """
    found: dict[str, Any] = {}
    spec = CASES["default"]
    for name in ("unreadable", "unwritable"):
        state: pb.SessionState | None = None
        errors = list[str]()
        for turn in range(2):
            worker.open(name, state=state, **spec)
            done = worker.submit(name, say(120, turn))
            error = done.exception(600)
            found[f"others, turn {turn} of {name}"] = _talk_together(worker)
            if isinstance(error, WorkerError):
                errors.append(type(error).__name__)
                worker.open(name, state=state, **spec)
                done = worker.submit(name, say(120, turn))
            state = done.result(600).state
        found[name] = {"errors": errors, "length": state.length if state else 0}
    return found


def _talk_together(worker: LocalWorker) -> list[dict[str, Any]]:
    """A turn in two sessions at once, which are deleted afterwards."""
    names = ("one", "other")
    for name in names:
        worker.open(name, **CASES["default"])
    running = [worker.submit(name, say(20, seed)) for seed, name in enumerate(names)]
    said = [describe(each.result(600)) for each in running]
    for name in names:
        worker.scheduler.delete(pb.DeleteRequest(session=name)).result(600)
    return said


SCENARIOS: dict[str, Callable[[LocalWorker], dict[str, Any]]] = {
    "turns": take_turns,
    "crowd": crowd,
    "reopen": reopen,
    "remember": remember,
    "families": converse,
    "failure": fail_and_go_on,
}
