"""Sessions' pages as plain lists, which a tree of page ids is compared with."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

# The pages of a tree: the one before each (None: none), and its number of references.
Tree = Mapping[bytes, tuple[bytes | None, int]]


def name_chain(tokens: Sequence[int]) -> tuple[bytes, ...]:
    """The ids of pages of one token each: equal as far as the tokens are."""
    ids: list[bytes] = []
    for token in tokens:
        parent = ids[-1] if ids else b""
        ids.append(blake2b(parent + bytes([token]), digest_size=16).digest())
    return tuple(ids)


class StoredNodes:
    """`services.catalog.page_tree.Nodes` in memory."""

    def __init__(self) -> None:
        self.tree: dict[bytes, tuple[bytes | None, int]] = {}
        self.dead: set[bytes] = set()

    def has(self, page: bytes) -> bool:
        """Whether the page is in the tree."""
        return page in self.tree

    def add(self, page: bytes, before: bytes | None) -> None:
        """Add a page with one reference."""
        assert page not in self.tree
        assert before is None or before in self.tree
        self.tree[page] = (before, 1)
        self.dead.discard(page)

    def hold(self, page: bytes) -> None:
        """Add a reference to a page."""
        before, refs = self.tree[page]
        self.tree[page] = (before, refs + 1)

    def release(self, page: bytes) -> bytes | None:
        """Take a reference from a page; without any it is dead."""
        before, refs = self.tree.pop(page)
        if refs > 1:
            self.tree[page] = (before, refs - 1)
            return None
        self.dead.add(page)
        return before


def check_tree(tree: Tree, chains: Iterable[tuple[bytes, ...]]) -> None:
    """Check that the tree has the pages of the chains alone, each count right."""
    ends = [chain[-1] for chain in chains if chain]
    pages = {page for chain in chains for page in chain}
    assert tree.keys() == pages
    refs = Counter([*ends, *(before for before, _ in tree.values() if before is not None)])
    assert {page: count for page, (_, count) in tree.items()} == refs
    befores = {
        page: before
        for chain in chains
        for before, page in zip((None, *chain), chain, strict=False)
    }
    assert {page: before for page, (before, _) in tree.items()} == befores
