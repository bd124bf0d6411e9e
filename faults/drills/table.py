"""All drills by name, and a round of them."""

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from random import Random

from faults import findings as kinds
from faults.drills import data, fleet, groups, late, memory, pages, streams
from faults.drills.base import Drill, Stage
from faults.findings import Findings
from faults.rig.setups import Rig

DRILLS: Mapping[str, Drill] = {
    "drill: an abort, a move, and back": data.come_back_after_an_abort,
    "drill: catalog restored from a backup": data.restore_catalog,
    "drill: catalog page overwritten": data.damage_catalog,
    "drill: Redis loses its data": data.empty_redis,
    "drill: Redis restored from a snapshot": data.restore_redis,
    "drill: Redis out of memory": memory.fill_redis,
    "drill: Redis that evicts": memory.evict_from_redis,
    "drill: worker of another version": fleet.skew_versions,
    "drill: turn that kills its worker": fleet.kill_by_turn,
    "drill: clocks of gateways differ": fleet.skew_clocks,
    "drill: commit after a takeover": late.commit_late,
    "drill: pages after a takeover": late.pages_late,
    "drill: a text that repeats itself": pages.repeat_text,
    "drill: pages deleted under a turn": pages.delete_under_a_turn,
    "drill: worker restarted before the commit": pages.restart_before_commit,
    "drill: gateway killed between events": streams.kill_gateway_between_events,
    "drill: worker killed between events": streams.kill_worker_between_events,
    "drill: failover by sentinels": groups.fail_over,
    "drill: slots move in a Redis cluster": groups.move_slots,
}


def run_drills(
    folder: Path, rig: Rig, calm: Sequence[str], seed: str, count: int, only: Sequence[str] = ()
) -> Findings:
    """Run `count` drills in turn."""
    found = Findings()
    names = [name for name in DRILLS if not only or name in only]
    for number, name in enumerate(islice(cycle(names), count)):
        place = folder / f"drill-{number}"
        place.mkdir(parents=True)
        stage = Stage(place, rig, calm, Random(f"{seed} {number}"))
        try:
            DRILLS[name](stage)
        except Exception:
            stage.findings.fail(kinds.BROKEN, [traceback.format_exc()])
        stage.findings.fail(kinds.WRONG_ERRORS, stage.counters.wrong_errors)
        for kind, texts in stage.findings.failures.items():
            found.fail(kind, [f"{name}: {text}" for text in texts])
        found.count(kinds.FAULTS, Counter({name: 1}))
        found.count("acknowledged", stage.counters.acknowledged)
    return found
