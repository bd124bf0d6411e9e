"""Drills on data: restored backups, lost data, damaged pages, and workers with files only."""

import shutil
from pathlib import Path

from faults.drills.base import Stage
from faults.rig.setups import cluster, embedded, files_only
from kvrecall.client import KvrecallClient, KvrecallError
from kvrecall_server.app.errors import ServerNotReady

CATALOG = "catalog.sqlite3"
PAGE_BYTES = 4096


def come_back_after_an_abort(stage: Stage) -> None:
    """An aborted turn in one worker, other words in the other, and back: only the log counts."""
    setup = files_only(stage.folder, stage.rig)
    with stage.started(setup) as client:
        contest = stage.talk(client)
        long_words = {"messages": [{"role": "user", "content": stage.words(30)}], "max_tokens": 300}
        client.abort(contest.session, long_words)
        client.move(contest.session)
        contest.say(client, stage.words(20))
        client.move(contest.session)
        contest.say(client, stage.words(4))
        stage.check(setup, client, contest)


def restore_catalog(stage: Stage) -> None:
    """The catalog is restored from a backup that is older than the pages beside it."""
    setup = embedded(stage.folder, stage.rig)
    data = setup.catalog.data
    with stage.started(setup) as client:
        contest = stage.talk(client)
        setup.stop()
        backup = stage.folder / "backup"
        backup.mkdir()
        _copy(data, backup, f"{CATALOG}*")
        setup.start()
        contest.say(client, stage.words(20))
        contest.say(client, stage.words(20))
        setup.stop()
        for path in data.glob(f"{CATALOG}*"):
            path.unlink()
        _copy(backup, data, f"{CATALOG}*")
        setup.start()
        contest.say(client, stage.words(16))
        stage.check_rows(setup, client, contest)


def damage_catalog(stage: Stage) -> None:
    """A page of the catalog's file is overwritten: refused in words, or it was not needed."""
    setup = embedded(stage.folder, stage.rig)
    with stage.started(setup) as client:
        contests = [stage.talk(client, 3) for _ in range(2)]
        setup.stop()
        path = setup.catalog.data / CATALOG
        page = stage.rng.randrange(path.stat().st_size // PAGE_BYTES)
        with path.open("r+b") as file:
            file.seek(page * PAGE_BYTES)
            file.write(stage.rng.randbytes(PAGE_BYTES))
        try:
            setup.workers[0].start(patience=0.0)
        except ServerNotReady:
            said = setup.workers[0].log.read_text(encoding="utf-8", errors="replace")
            stage.expect("catalog" in said, "a start on a damaged catalog does not name it")
            return
        api = KvrecallClient(setup.urls[0], 60.0)
        for contest in contests:
            try:
                answer = api.turn(contest.session, contest.messages("Hello?"), max_tokens=4)
                log = len(contest.acknowledged) + 1
                stage.expect(
                    answer.turn == log, f"turn {answer.turn} of {log} on a damaged catalog"
                )
            except KvrecallError as error:
                stage.expect(
                    (error.status, error.code)
                    in ((503, "catalog_error"), (404, "unknown_session")),
                    f"a damaged catalog: {error.status} {error.code} {error.detail}",
                )
        api.close()


def empty_redis(stage: Stage) -> None:
    """Redis comes back without its data: old sessions are refused, new ones are right.

    The catalog there is another one from then on. The workers' files are given to it as
    docs/operations.md says.
    """
    setup = cluster(stage.folder, stage.rig)
    assert setup.redis is not None, "a cluster has one"
    with stage.started(setup) as client:
        old = stage.talk(client)
        setup.redis.kill()
        shutil.rmtree(setup.redis.folder)
        setup.redis.folder.mkdir()
        setup.redis.start()
        _expect_refused_or_right(stage, setup.urls[0], old.session, len(old.acknowledged))
        for server in setup.servers:
            server.stop()
        for pages in setup.pages:
            (pages / "catalog-id").unlink()
        setup.start()
        stage.check(setup, client, stage.talk(client))


def restore_redis(stage: Stage) -> None:
    """Redis comes back with an old snapshot, while workers have newer rows in memory and files.

    What it acknowledged since is lost with it. What is left is answered as its log says.
    """
    setup = cluster(stage.folder, stage.rig)
    assert setup.redis is not None, "a cluster has one"
    with stage.started(setup) as client:
        contest = stage.talk(client)
        setup.redis.kill()
        backup = stage.folder / "backup"
        shutil.copytree(setup.redis.folder, backup)
        setup.redis.start()
        contest.say(client, stage.words(20))
        setup.redis.kill()
        shutil.rmtree(setup.redis.folder)
        shutil.copytree(backup, setup.redis.folder)
        setup.redis.start()
        contest.say(client, stage.words(16))
        stage.check_rows(setup, client, contest)


def _expect_refused_or_right(stage: Stage, url: str, session: str, turns: int) -> None:
    with KvrecallClient(url, 60.0) as api:
        try:
            answer = api.turn(session, "Hello?", max_tokens=4)
            stage.expect(answer.turn == turns + 1, f"turn {answer.turn} after {turns}")
        except KvrecallError as error:
            stage.expect(error.status in (404, 503), f"a lost session: {error.status} {error.code}")


def _copy(source: Path, target: Path, pattern: str) -> None:
    for path in source.glob(pattern):
        shutil.copy2(path, target / path.name)
