"""A gateway on SQLite that waits before it commits a turn with the word LATE in it."""

import asyncio

from services.catalog.quota import TenantLimits
from services.catalog.records import IdempotencyRecord, TurnCommit
from services.catalog.sqlite.turns import SqliteTurns

LATE_SECONDS = 10.0
LATE = "LATE"


def apply() -> None:
    """Replace the catalog's commits of turns."""
    commit = SqliteTurns.commit

    async def late(
        self: SqliteTurns,
        turn: TurnCommit,
        epoch: int,
        record: IdempotencyRecord | None,
        *limits: TenantLimits,
    ) -> None:
        if any(LATE in message.content for message in turn.turn.messages):
            await asyncio.sleep(LATE_SECONDS)
        await commit(self, turn, epoch, record, *limits)

    SqliteTurns.commit = late  # type: ignore[assignment]
