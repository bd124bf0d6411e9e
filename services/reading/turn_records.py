"""The turn log with the tokens' positions in the session."""

from dataclasses import dataclass

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.utterances import Utterance, utterances
from services.catalog.base import Catalog
from services.catalog.token_log import restate_turns

_TURNS_AT_ONCE = 64


@dataclass(frozen=True)
class TurnRecord:
    """A committed turn, whose tokens are `start` .. `stop - 1` of its session."""

    turn: Turn

    @property
    def start(self) -> int:
        """The position of the turn's first token."""
        return self.stop - len(self.turn.token_ids)

    @property
    def stop(self) -> int:
        """The position after the turn's last token."""
        return self.turn.outcome.stop

    @property
    def spans(self) -> list[Utterance]:
        """The turn's text by side, with its tokens."""
        return utterances([self.turn], self.start)


async def read_turns(catalog: Catalog, session: str, after: int, limit: int) -> list[TurnRecord]:
    """Read up to `limit` turns that follow turn `after`, in order."""
    turns = await catalog.turns.get_after(session, after, limit)
    return [TurnRecord(turn) for turn in turns]


async def read_rewritten(catalog: Catalog, session: str) -> list[Turn] | None:
    """Read all turns of a session whose chat template has rewritten some; None for any other."""
    turns = list[Turn]()
    if not (await catalog.sessions.get(session)).memory.dropped_tokens:
        return None
    while page := await catalog.turns.get_after(session, len(turns), _TURNS_AT_ONCE):
        turns += page
    return turns


async def find_turns(catalog: Catalog, session: Session, start: int, stop: int) -> list[TurnRecord]:
    """Read the turns of the tokens `start` .. `stop - 1`.

    The first is searched for by halves, so that a long log is not read whole. What later turns rewrote
    of the earlier ones is left out of these. Raises UnknownSession when the session was deleted
    meanwhile.
    """
    log = await read_rewritten(catalog, session.id)
    if log is not None:
        found = [TurnRecord(turn) for turn in restate_turns(log)]
        return [record for record in found if record.start < stop and record.stop > start]
    low, high = 1, session.turns
    while low < high:
        middle = (low + high) // 2
        if (await _read_turn(catalog, session.id, middle)).stop > start:
            high = middle
        else:
            low = middle + 1
    found = []
    while page := await read_turns(catalog, session.id, low - 1 + len(found), _TURNS_AT_ONCE):
        found += page
        if page[-1].stop >= stop:
            break
    return [record for record in found if record.start < stop and record.stop > start]


async def _read_turn(catalog: Catalog, session: str, number: int) -> TurnRecord:
    found = await read_turns(catalog, session, number - 1, 1)
    if not found:
        raise UnknownSession(session)
    return found[0]
