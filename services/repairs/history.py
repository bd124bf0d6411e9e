"""The history of repairs, with the text around the tokens that they promoted."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.domain.sessions.session import Turn
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Catalog
from services.catalog.records import RepairRecord
from services.catalog.token_log import join_tokens
from services.cluster.worker_client import Worker
from services.reading.turn_records import read_rewritten

# Tokens shown on either side of a promoted passage.
CONTEXT_TOKENS = 16


@dataclass(frozen=True)
class Passage:
    """Tokens `start` ..

    `stop - 1` of a session, which a repair promoted, with the text around them.
    """

    start: int
    stop: int
    before: str
    promoted: str
    after: str


@dataclass(frozen=True)
class RepairHistoryEntry:
    """A past repair with the passages that it promoted."""

    record: RepairRecord
    passages: tuple[Passage, ...]


async def load_repair_history(
    catalog: Catalog, worker: Worker, session: str, limit: int
) -> list[RepairHistoryEntry]:
    """Load up to `limit` of a session's last repairs, the newest first. Raises UnknownSession."""
    records = await catalog.repairs.get_latest(session, limit)
    tokens = await catalog.turns.get_token_ids(session) if records else ()
    log = await read_rewritten(catalog, session) if records else None
    return [
        RepairHistoryEntry(
            record, await _passages(worker, _find_tokens(log, tokens, record), record)
        )
        for record in records
    ]


def _find_tokens(
    log: Sequence[Turn] | None, tokens: Sequence[int], record: RepairRecord
) -> Sequence[int]:
    """Find the tokens that the session had when a repair ran; log: of one that was rewritten."""
    if log is None:
        return tokens
    before = [turn for turn in log if turn.number < record.turn]
    own = [turn for turn in log if turn.number == record.turn and record.report.trigger == "turn"]
    return join_tokens([*before, *own])


async def _passages(
    worker: Worker, tokens: Sequence[int], record: RepairRecord
) -> tuple[Passage, ...]:
    found = runs([position for position in record.details.positions if position < len(tokens)])
    if not found:
        return ()
    chunks = [
        pb.TokenChunk(ids=tokens[start:stop])
        for first, last in found
        for start, stop in (
            (max(0, first - CONTEXT_TOKENS), first),
            (first, last),
            (last, last + CONTEXT_TOKENS),
        )
    ]
    texts = iter((await worker.detokenize(pb.DetokenizeRequest(chunks=chunks))).texts)
    return tuple(
        Passage(first, last, next(texts), next(texts), next(texts)) for first, last in found
    )


def runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Join ascending positions into runs `(first, one past the last)`."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
