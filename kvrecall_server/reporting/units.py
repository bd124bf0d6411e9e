"""Numbers as text."""


def readable_bytes(count: float) -> str:
    """A number of bytes in the largest unit in which it is at least 1: `3.0 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
