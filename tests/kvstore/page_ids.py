"""Ids of made-up pages."""

from hashlib import blake2b

from kvstore.format.page import ID_BYTES, PageId


def make_id(number: int, chain: str = "s") -> PageId:
    """The id of a page of the tests: the same for the same number and chain."""
    return blake2b(f"{chain}/{number}".encode(), digest_size=ID_BYTES).digest()


def make_ids(numbers: range, chain: str = "s") -> list[PageId]:
    """The ids of several pages."""
    return [make_id(number, chain) for number in numbers]
