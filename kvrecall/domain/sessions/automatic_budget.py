"""The budget of a session that names none: it follows from the rows that the session has."""

# An eighth of the rows: the share at which sessions that recall answer as the full cache does
# (docs/design/retrieval.md, "An agent's session").
_SHARE = 8
LEAST = 1024
# A budget grows by whole pages, so that its configuration does not change with every block.
_STEP = 64


def choose_budget(rows: int, most: int) -> int:
    """Choose the budget of a session of so many rows per head that do not all fit into a slot.

    An eighth of them, in steps of 64, at least 1,024, and no more than a slot holds (`most`).
    """
    share = -(-rows // (_SHARE * _STEP)) * _STEP
    return min(max(share, LEAST), most)
