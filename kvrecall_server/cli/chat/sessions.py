"""Sessions by name: a chat goes on where the last one of that name ended."""

from kvrecall.client import KvrecallClient, KvrecallError, Session
from kvrecall.domain.codes import ErrorCode
from kvrecall_server.app.errors import CliError

NAME = "name"
"""The metadata that holds a session's name."""
_ID_BEGINS = "s_"
_PAGE = 200


def find_session(client: KvrecallClient, name: str) -> Session | None:
    """Find the session with this id, or the newest with this name; None if there is none.

    Raises CliError for an id that no session has.
    """
    try:
        return client.get_session(name)
    except KvrecallError as error:
        if error.code != ErrorCode.UNKNOWN_SESSION:
            raise
    if name.startswith(_ID_BEGINS):
        raise CliError(f"there is no session {name}; a name does not begin with {_ID_BEGINS}")
    cursor = None
    while True:
        page = client.list_sessions(_PAGE, cursor, q=name)
        for each in page.sessions:
            if each.metadata.get(NAME) == name:
                return each
        cursor = page.next_cursor
        if cursor is None:
            return None
