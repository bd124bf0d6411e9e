"""Drills on streams of OpenAI's APIs: a process is killed between any two events of an answer."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from faults.drills.base import Stage
from faults.load.client import FaultClient
from faults.load.counters import Counters
from faults.load.scripts import get_question
from faults.load.talks import APIS, TENANT, Api, Say, Talk, TalkScript
from faults.rig.processes import ServerProcess
from faults.rig.setups import Setup, cluster
from faults.wake import check_talk
from kvrecall.client import KvrecallClient

# An answer of so many tokens has no more than 13 events in each API.
TOKENS = 5
SAYS = 13

Find = Callable[[Setup, FaultClient, Talk], ServerProcess]


def kill_gateway_between_events(stage: Stage) -> None:
    """The gateway is killed after each event of a stream: the request is repeated, and goes on."""
    _kill_between_events(stage, _find_gateway)


def kill_worker_between_events(stage: Stage) -> None:
    """The session's worker is killed after each event of a stream: the stream goes on."""
    _kill_between_events(stage, _find_worker)


def _kill_between_events(stage: Stage, find: Find) -> None:
    setup = cluster(stage.folder, stage.rig)
    client = FaultClient(setup.urls, stage.counters, stage.rng, tenant=TENANT)
    calm_client = FaultClient(stage.calm, Counters(), Random(0), tenant=TENANT)
    try:
        with stage.started(setup):
            api = stage.rng.choice(APIS)
            name = f"{stage.folder.name}-{stage.rng.randrange(1 << 30)}"
            calm = Talk(_script(stage.rng, api), f"calm-{name}")
            calm.run(calm_client, calm=True)
            calm.delete(calm_client)
            talk = Talk(calm.script, name)
            talk.run(client, 1)
            kills = [_say(setup, client, talk, number, find) for number in range(1, SAYS)]
            stage.expect(sum(kills) > TOKENS, f"{api}: after {sum(kills)} events there was a kill")
            stage.findings.add(check_talk(setup, client, talk, calm, 0))
    finally:
        client.close()
        calm_client.close()


def _script(rng: Random, api: Api) -> TalkScript:
    keyed = api == "conversation"
    says = [
        Say(get_question(rng), TOKENS, True, keyed or number % 2 == 0) for number in range(SAYS)
    ]
    return TalkScript(rng.randrange(100), api, tuple(says), len(says))


def _say(setup: Setup, client: FaultClient, talk: Talk, number: int, find: Find) -> bool:
    """Say one thing; the process ends after event number `number` - 1. True if there was one."""
    kill = _Kill(find(setup, client, talk), number - 1)
    talk.say(client, number, heard=kill.hear)
    return kill.done


@dataclass
class _Kill:
    """Kills and restarts a process once, after one event of a stream."""

    server: ServerProcess
    event: int
    done: bool = False

    def hear(self, number: int) -> None:
        if number == self.event and not self.done:
            self.done = True
            self.server.kill()
            self.server.start()


def _find_gateway(setup: Setup, client: FaultClient, talk: Talk) -> ServerProcess:
    return setup.gateways[setup.urls.index(client.url)]


def _find_worker(setup: Setup, client: FaultClient, talk: Talk) -> ServerProcess:
    session = talk.answers[-1].session
    with KvrecallClient(client.url, 60.0, tenant=TENANT) as api:
        name = api.get_session(session).worker
    return next(worker for worker in setup.workers if worker.name == name)
