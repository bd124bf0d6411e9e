"""Reads of a tenant's sessions, each against what is committed; turns and repairs go on meanwhile."""

from collections.abc import Callable

from kvrecall.domain.errors import InvalidRequest, LimitExceeded
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.worker_info import WorkerInfo
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.base import Catalog
from services.catalog.records import REPAIRS_RETAINED
from services.cluster.worker_client import Worker
from services.reading.family import Family, read_family
from services.reading.memory_map import (
    MapContext,
    MemoryMap,
    TokenRecords,
    build_tokens,
    get_token_ids,
    index_repairs,
)
from services.reading.pauses import Pause, read_pauses
from services.reading.search import FoundSessions, GetState, SessionQuery, search
from services.reading.turn_records import TurnRecord, find_turns, read_turns
from services.reading.versions import get_version

MAX_TOKENS = 512
"""The most tokens that one request explains."""
_ATTEMPTS = 3


class SessionReader:
    """Reads what the catalog has of sessions; a worker decodes rows and tokens, without opening one.

    Methods that name a session raise UnknownSession, also for another tenant's.
    """

    def __init__(
        self,
        catalog: Catalog,
        worker: Worker,
        get_state: GetState,
        get_info: Callable[[], WorkerInfo],
    ) -> None:
        self._catalog = catalog
        self._worker = worker
        self._get_state = get_state
        self._get_info = get_info

    async def get(self, session: str, tenant: str) -> Session:
        """Return the session as committed."""
        return await self._catalog.sessions.get(session, tenant)

    async def search(self, query: SessionQuery, tenant: str) -> FoundSessions:
        """List a page of a tenant's sessions. Raises InvalidRequest for a wrong cursor."""
        return await search(self._catalog, query, tenant, self._get_state)

    async def turns(self, session: Session, after: int, limit: int) -> list[TurnRecord]:
        """Read up to `limit` turns of the log that follow turn `after`, with their positions."""
        return await read_turns(self._catalog, session.id, after, limit)

    async def family(self, session: Session) -> Family:
        """Read the family of a session."""
        return await read_family(self._catalog, session, self._get_info().page_tokens)

    async def pauses(self, session: Session, limit: int) -> list[Pause]:
        """Read the last pauses of a session, the newest first."""
        return await read_pauses(self._catalog, session, limit)

    async def map(
        self, session: Session, start: int, stop: int | None, columns: int, head: int | None
    ) -> MemoryMap:
        """Map the tokens `start` .. `stop - 1` (None: all) in `columns` cells a layer.

        `head`: one KV head; None: all of them. Raises InvalidRequest for a head that the model does
        not have, or a `start` after the `stop`.
        """
        info = self._get_info()
        if head is not None and head >= info.kv_heads:
            raise InvalidRequest(
                "head", f"there is no KV head {head}: the model has {info.kv_heads}, from 0"
            )
        session, state = await self._read_committed(session)
        length = state.length + state.unsettled
        stop = length if stop is None else min(stop, length)
        start = _check_start(start, stop, length)
        request = pb.MapRowsRequest(state=state, start=start, stop=stop, columns=columns, head=head)
        mapped = await self._worker.map_rows(request)
        last = await read_turns(self._catalog, session.id, session.turns - 1, 1)
        return MemoryMap(
            session=session,
            length=length,
            start=start,
            stop=stop,
            head=head,
            kv_heads=info.kv_heads,
            layers=tuple((layer.active, layer.promoted) for layer in mapped.layers),
            sinks=min(mapped.sinks, state.length),
            recent_start=max(0, state.length - mapped.recent),
            turn_start=last[0].start if session.turns and last else None,
            episode=state.episode,
        )

    async def tokens(self, session: Session, start: int, stop: int | None) -> TokenRecords:
        """Explain the tokens `start` .. `stop - 1`, by default MAX_TOKENS of them.

        Raises LimitExceeded for more, InvalidRequest for a `start` after the `stop`.
        """
        if stop is not None and stop - start > MAX_TOKENS:
            raise LimitExceeded(
                "stop", f"{stop - start} tokens; at most {MAX_TOKENS} at once", MAX_TOKENS
            )
        info = self._get_info()
        session, state = await self._read_committed(session)
        length = state.length + state.unsettled
        log_length = state.length + len(state.pending)
        stop = min(start + MAX_TOKENS if stop is None else stop, log_length)
        start = _check_start(start, stop, log_length)
        records = TokenRecords(session, length, log_length, start, info.layers, info.kv_heads, ())
        if start == stop:
            return records
        request = pb.MapRowsRequest(state=state, start=start, stop=stop, tokens=True)
        mapped = await self._worker.map_rows(request)
        turns = await find_turns(self._catalog, session, start, stop)
        chunks = [pb.TokenChunk(ids=[token]) for token in get_token_ids(turns, start, stop)]
        texts = (await self._worker.detokenize(pb.DetokenizeRequest(chunks=chunks))).texts
        context = await self._build_context(session, state, mapped, turns)
        tokens = build_tokens(context, start, mapped, texts, info.layers, info.kv_heads)
        return TokenRecords(session, length, log_length, start, info.layers, info.kv_heads, tokens)

    async def _build_context(
        self,
        session: Session,
        state: pb.SessionState,
        mapped: pb.MapRowsResult,
        turns: list[TurnRecord],
    ) -> MapContext:
        repairs = await self._catalog.repairs.get_latest(session.id, REPAIRS_RETAINED)
        last = await read_turns(self._catalog, session.id, session.turns - 1, 1)
        return MapContext(
            session=session,
            state=state,
            sinks=mapped.sinks,
            recent=mapped.recent,
            turns=turns,
            turn_start=last[0].start if last else state.length,
            promoted_by=index_repairs(repairs[::-1]),
        )

    async def _read_committed(self, session: Session) -> tuple[Session, pb.SessionState]:
        """Read the worker's state and the session that it was committed with.

        These are two reads; a commit in between shows as another version, and they are repeated.
        """
        for _ in range(_ATTEMPTS):
            state = await self._catalog.sessions.get_worker_state(session.id)
            again = await self._catalog.sessions.get(session.id)
            if get_version(again) == get_version(session):
                break
            session = again
        return session, pb.SessionState.FromString(state)


def _check_start(start: int, stop: int, length: int) -> int:
    """Return a `start` within the tokens. Raises InvalidRequest if it is after the `stop`."""
    if start > max(stop, length):
        raise InvalidRequest("start", f"token {start} is after the end, {length}")
    if start > stop:
        raise InvalidRequest("start", f"token {start} is after the stop, {stop}")
    return start
