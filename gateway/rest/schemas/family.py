"""The family of a session: the sessions that were forked from the same first one."""

from gateway.rest.schemas.public import to_time
from kvrecall import client
from kvrecall.domain.sessions.state_machine import SessionState
from services.reading.family import Family, Member


def to_family(session: str, family: Family, states: dict[str, SessionState]) -> client.Family:
    """Convert the family of a session and the states of its members."""
    return client.Family(
        session=session,
        root=family.root,
        members=tuple(_to_member(each, states.get(each.id)) for each in family.members),
        scanned=family.scanned,
        complete=family.complete,
    )


def _to_member(member: Member, state: SessionState | None) -> client.FamilyMember:
    session = member.session
    return client.FamilyMember(
        id=member.id,
        parent=member.parent,
        turn=member.turn,
        exists=session is not None,
        turns=None if session is None else session.turns,
        length=None if session is None else session.memory.length,
        state=None if state is None else state.value,
        created_at=None if session is None else to_time(session.created_at),
        shared_tokens=member.shared_tokens,
    )
