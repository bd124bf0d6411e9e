"""A gateway on SQLite that commits a turn with the word LATE in it once a file is there."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from faults.rig.processes import until
from services.catalog.quota import TenantLimits
from services.catalog.records import IdempotencyRecord, TurnCommit
from services.catalog.sqlite.turns import SqliteTurns

LATE = "LATE"
# Names the file.
WHEN = "KVRECALL_FAULTS_COMMIT_WHEN"
_MOST_SECONDS = 300.0


def apply() -> None:
    """Replace the catalog's commits of turns."""
    commit = SqliteTurns.commit
    file = Path(os.environ[WHEN])

    async def late(
        self: SqliteTurns,
        turn: TurnCommit,
        epoch: int,
        record: IdempotencyRecord | None,
        *limits: TenantLimits,
    ) -> None:
        if any(LATE in message.content for message in turn.turn.messages):
            loop = asyncio.get_running_loop()
            with ThreadPoolExecutor(1) as own:
                wait = partial(until, file.exists, f"{file} is there", _MOST_SECONDS)
                await loop.run_in_executor(own, wait)
        await commit(self, turn, epoch, record, *limits)

    SqliteTurns.commit = late  # type: ignore[assignment]
