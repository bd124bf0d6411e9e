"""Whether the tiers hold exactly what the sessions' tables say."""

from kvstore.errors import InvariantError
from kvstore.format.page import PageKey, PageLayout
from kvstore.hierarchy.tier_stack import TierStack
from kvstore.sessions.directory import SessionDirectory
from kvstore.sessions.state import StoredSession


def check_store(layout: PageLayout, stack: TierStack, sessions: SessionDirectory) -> None:
    """Raise InvariantError unless every page that a session wrote is stored, and none of nobody.

    Where others write the lowest tier too, only sessions in memory are looked at. Nothing may be on its way.
    """
    expected: dict[PageKey, int] = {}
    may_be: set[PageKey] = set()
    names = set()
    for state in sessions.states():
        with state.lock:
            _check_session(state, layout.page_tokens)
            names.add(state.name)
            for index in range(len(state.table)):
                key = state.table.key(index)
                sequence = state.table.sequence(index)
                if key.session != state.name or sequence is None:
                    may_be.add(key)
                else:
                    expected[key] = sequence
    _check_lowest(stack, sessions, expected, may_be, names if stack.tiers.lowest.shared else None)
    known = expected.keys() | may_be
    for tier in stack.tiers.all[:-1]:
        held = {header.key for header in tier.stored()}
        if stack.tiers.lowest.shared:
            held = {key for key in held if key.session in names}
        if stray := {key for key in held - known if not _is_kept(sessions, key)}:
            raise InvariantError(f"tier {tier.name} holds pages of nobody: {sorted(stray)}")


def _check_lowest(
    stack: TierStack,
    sessions: SessionDirectory,
    expected: dict[PageKey, int],
    may_be: set[PageKey],
    names: set[str] | None,
) -> None:
    found = {
        header.key: header.sequence
        for name in (sorted(names) if names is not None else [None])
        for header in stack.tiers.lowest.stored(name)
    }
    owed = stack.placement.owed_keys()
    lost = {key for key, sequence in expected.items() if found.get(key) != sequence} - owed
    stray = {key for key in found.keys() - expected.keys() - may_be if not _is_kept(sessions, key)}
    if lost or stray:
        raise InvariantError(
            f"lost or stale pages: {sorted(lost)}, pages of nobody: {sorted(stray)}, "
            f"of {len(expected)}"
        )


def _is_kept(sessions: SessionDirectory, key: PageKey) -> bool:
    return key.index < sessions.kept_pages(key.session) or sessions.is_left(key.session)


def _check_session(state: StoredSession, page_tokens: int) -> None:
    full, unfinished = divmod(state.length, page_tokens)
    handed_over = len(state.table)
    if handed_over not in (full, full + 1 if unfinished else full):
        raise InvariantError(
            f"session {state.name!r}: {state.length} tokens, {handed_over} pages handed over"
        )
    if unfinished and handed_over == full and state.tail is None:
        raise InvariantError(f"session {state.name!r}: its unfinished page is nowhere")
