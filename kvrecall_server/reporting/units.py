"""Numbers as text."""


def readable_bytes(count: float) -> str:
    """A number of bytes in the largest unit in which it is at least 1: `3.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            digits = {"B": 0, "GiB": 2}.get(unit, 1)
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
