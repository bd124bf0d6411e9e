"""Whose pages a session is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SharedPages:
    """The pages of a session before index `pages` are those that `owner` wrote, but for what an entry before covers."""

    owner: str
    pages: int
