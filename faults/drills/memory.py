"""Drills on a Redis without memory: it refuses, or would evict."""

import time

from faults.drills.base import Stage
from faults.rig.setups import cluster
from kvrecall.client import KvrecallClient, KvrecallError
from kvrecall_server.app.errors import ServerNotReady

ROOM_BYTES = 100_000
DELETE_SECONDS = 20.0


def fill_redis(stage: Stage) -> None:
    """Redis is full, with `noeviction`: writes are refused or go on, deletions free it."""
    setup = cluster(stage.folder, stage.rig)
    assert setup.redis is not None, "a cluster has one"
    with stage.started(setup) as client:
        contests = [stage.talk(client) for _ in range(3)]
        with setup.redis.client() as redis:
            used = redis.info("memory")["used_memory"]
            redis.config_set("maxmemory", used + ROOM_BYTES)
            with KvrecallClient(setup.urls[0], 60.0) as api:
                for _ in range(6):
                    _try(stage, api, contests[0].session)
                start = time.monotonic()
                _delete(stage, api, contests[1].session)
                seconds = time.monotonic() - start
            stage.expect(
                seconds < DELETE_SECONDS, f"a deletion took {seconds:.0f} s on a full Redis"
            )
            redis.config_set("maxmemory", 0)
        contests[2].say(client, stage.words(4))
        stage.check(setup, client, contests[2])


def evict_from_redis(stage: Stage) -> None:
    """A Redis that evicts keys is refused at the start, by name of the policy."""
    setup = cluster(
        stage.folder, stage.rig, {"maxmemory-policy": "allkeys-lru", "maxmemory": "64mb"}
    )
    assert setup.redis is not None, "a cluster has one"
    try:
        setup.redis.start()
        server = setup.workers[0]
        try:
            server.start(patience=0.0)
        except ServerNotReady:
            said = server.log.read_text(encoding="utf-8", errors="replace")
            stage.expect("allkeys-lru" in said, "a start on a Redis that evicts does not say why")
        else:
            stage.expect(False, "a worker starts on a Redis that evicts")
    finally:
        setup.close()


def _try(stage: Stage, api: KvrecallClient, session: str) -> None:
    try:
        api.turn(session, stage.words(20), max_tokens=4)
    except KvrecallError as error:
        # The catalog refuses to grow while there is still room for deletions (docs/operations.md): sooner
        # where a turn stores more, such as recurrent states.
        stage.expect(
            error.status in (429, 503, 0) or error.code == "storage_full",
            f"a full Redis: {error.status} {error.code} {error.detail}",
        )


def _delete(stage: Stage, api: KvrecallClient, session: str) -> None:
    try:
        api.delete_session(session)
    except KvrecallError as error:
        stage.expect(
            False, f"nothing can be deleted from a full Redis: {error.status} {error.code}"
        )
