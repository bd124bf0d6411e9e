"""Drills on a fleet: versions that differ, clocks that differ, and a turn that kills its worker."""

import threading
import time
from dataclasses import asdict

from faults.drills.base import Stage
from faults.rig import clock
from faults.rig.setups import Setup, cluster
from kvrecall.client import KvrecallClient, KvrecallError

# A turn is tried in one other worker after a death that nothing explains, then refused.
MOST_DEATHS = 2
PAUSE_SECONDS = 20.0


def skew_versions(stage: Stage) -> None:
    """A worker of another protocol version is left out, in words, and the other serves."""
    setup = cluster(stage.folder, stage.rig)
    patched = setup.workers[1]
    patched.environment = {
        **patched.environment,
        clock.PATCH: "faults.drills.other_version",
    }
    with stage.started(setup) as client:
        contest = stage.talk(client)
        with KvrecallClient(setup.urls[0]) as api:
            names = {load.name for load in api.workers()}
        stage.expect(names == {setup.workers[0].name}, f"workers in use: {sorted(names)}")
        said = setup.gateways[0].log.read_text(encoding="utf-8")
        stage.expect("upgrade the gateway" in said, "the gateway does not say what to upgrade")
        stage.check(setup, client, contest)


def kill_by_turn(stage: Stage) -> None:
    """A turn that kills its worker each time is refused before it has killed all of them."""
    setup = cluster(stage.folder, stage.rig)
    for worker in setup.workers:
        worker.environment = {
            **worker.environment,
            clock.PATCH: "faults.drills.deadly_turn",
        }
    with stage.started(setup) as client:
        contests = [stage.talk(client) for _ in range(2)]
        over = threading.Event()
        deaths: list[str] = []
        keeper = threading.Thread(target=_restart_dead, args=(setup, over, deaths))
        keeper.start()
        try:
            with KvrecallClient(setup.urls[0], 60.0) as api:
                try:
                    api.turn(contests[0].session, "DEATH", max_tokens=4, queue=True)
                    stage.expect(False, "a turn that kills every worker was answered")
                except KvrecallError as error:
                    stage.expect(error.status == 503, f"a deadly turn: {error.status} {error.code}")
            contests[1].say(client, stage.words(4))
        finally:
            over.set()
            keeper.join()
        stage.expect(len(deaths) <= MOST_DEATHS, f"one turn killed {len(deaths)} workers")
        for contest in contests:
            stage.check(setup, client, contest)


def skew_clocks(stage: Stage) -> None:
    """The clock of one gateway is ahead: a tool call of the other is not given up."""
    setup = cluster(
        stage.folder, stage.rig, more={"KVRECALL_SERVICE__PAUSE_SECONDS": str(PAUSE_SECONDS)}
    )
    with stage.started(setup) as client:
        clock.set_offset(setup.gateways[1].clock, 10 * PAUSE_SECONDS)
        session = stage.talk(client).session
        function = {"name": "look_up", "arguments": "{}"}
        asks = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": function}],
        }
        with KvrecallClient(setup.urls[0], 60.0) as api:
            question = {"role": "user", "content": "What is it?"}
            api.turn(session, [question, asks], generate=False)
            time.sleep(PAUSE_SECONDS / 4)  # two sweeps
            try:
                receipt = asdict(api.event(session, "tool_call.completed", "c", result="It is 7."))
                stage.expect(receipt["status"] == "completed", f"the call is {receipt['status']}")
            except KvrecallError as error:
                stage.expect(False, f"a result in time is refused: {error.status} {error.code}")


def _restart_dead(setup: Setup, over: threading.Event, deaths: list[str]) -> None:
    while not over.wait(0.2):
        for worker in setup.workers:
            if worker.running is not None and not worker.alive:
                deaths.append(worker.name)
                worker.kill()
                worker.start()
