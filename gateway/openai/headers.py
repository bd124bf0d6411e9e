"""Headers of an answer: the session that has it, and how it was found."""

from services.conversations.matching import Continuation


def get_session_headers(found: Continuation) -> dict[str, str]:
    """Return the headers that name the session, its turn, and how the session was found."""
    return {
        "kvrecall-session": found.session,
        "kvrecall-match": found.match,
        "kvrecall-turn": str(found.turn),
    }
