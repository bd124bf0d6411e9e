"""The family of a session: the sessions that were forked from the same first one."""

from datetime import datetime

from gateway.rest.schemas.base import View
from gateway.rest.schemas.log import to_time
from kvrecall.domain.state_machine import SessionState
from services.reading.family import Family, Member


class SharedTokensView(View):
    """Leading tokens whose stored rows are those of another session."""

    session: str
    tokens: int


class FamilyMemberView(View):
    """Session of a family, forked from `parent` at the end of `turn`.

    One that does not exist any more has its id alone.
    """

    id: str
    parent: str | None
    turn: int | None
    exists: bool
    turns: int | None
    length: int | None
    state: str | None
    created_at: datetime | None
    shared: list[SharedTokensView]

    @classmethod
    def from_domain(cls, member: Member, state: SessionState | None) -> "FamilyMemberView":
        """Convert from a member and its state."""
        session = member.session
        return cls(
            id=member.id,
            parent=member.parent,
            turn=member.turn,
            exists=session is not None,
            turns=None if session is None else session.turns,
            length=None if session is None else session.memory.length,
            state=None if state is None else state.value,
            created_at=None if session is None else to_time(session.created_at),
            shared=[
                SharedTokensView(session=owner, tokens=tokens) for owner, tokens in member.shared
            ],
        )


class FamilyView(View):
    """Family of a session: `root` first, then by creation.

    `scanned` of the tenant's sessions were looked at, the newest; `complete`: these are all.
    """

    session: str
    root: str
    members: list[FamilyMemberView]
    scanned: int
    complete: bool

    @classmethod
    def from_domain(
        cls, session: str, family: Family, states: dict[str, SessionState]
    ) -> "FamilyView":
        """Convert from the family of a session and the states of its members."""
        return cls(
            session=session,
            root=family.root,
            members=[
                FamilyMemberView.from_domain(each, states.get(each.id)) for each in family.members
            ],
            scanned=family.scanned,
            complete=family.complete,
        )
