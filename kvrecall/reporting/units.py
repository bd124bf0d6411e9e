"""Numbers as people read them."""


def readable_bytes(count: float) -> str:
    """Bytes in the largest unit that leaves a whole part."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
