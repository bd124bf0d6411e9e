"""Bound on what one tenant may hold of a number of places."""


def has_room(held: int, taken: int, places: int, share: float, weight: float = 1.0) -> bool:
    """Check if a tenant that holds `held` of the `taken` places may take one more of them.

    Alone it gets a `share` of all `places`, at most, and beside others as much of what they leave:
    so some are always free for a tenant that comes later (dynamic thresholds, Choudhury and Hahne
    1998). With a share of 1 whoever comes first may hold all. Few places may all be taken.
    """
    if taken >= places:
        return False
    return share >= 1 or held < weight * (places - taken) * share / (1 - share)
