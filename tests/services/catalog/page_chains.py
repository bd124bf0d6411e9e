"""Sessions' pages as plain lists, which a tree of page ids is compared with."""

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

from services.catalog.page_tree import Run


def name_chain(tokens: Sequence[int]) -> tuple[bytes, ...]:
    """The ids of pages of one token each: equal as far as the tokens are."""
    ids: list[bytes] = []
    for token in tokens:
        parent = ids[-1] if ids else b""
        ids.append(blake2b(parent + bytes([token]), digest_size=16).digest())
    return tuple(ids)


class StoredRuns:
    """`services.catalog.page_tree.Runs` in memory."""

    def __init__(self) -> None:
        self.by_id: dict[int, Run] = {}
        self._next = 1

    def find(self, first: bytes) -> Run | None:
        """The run that begins with a page."""
        found = [run for run in self.by_id.values() if run.pages[0] == first]
        assert len(found) < 2, "no two runs begin with the same page"
        return found[0] if found else None

    def get(self, run_id: int) -> Run:
        """A run that exists."""
        return self.by_id[run_id]

    def add(self, parent: int | None, refs: int, pages: Sequence[bytes]) -> int:
        """Add a run."""
        run_id, self._next = self._next, self._next + 1
        self.by_id[run_id] = Run(run_id, parent, refs, tuple(pages))
        return run_id

    def put(self, run: Run) -> None:
        """Replace a run."""
        assert run.id in self.by_id
        self.by_id[run.id] = run

    def remove(self, run_id: int) -> None:
        """Remove a run."""
        del self.by_id[run_id]


def list_pages(runs: dict[int, Run], leaf: int | None) -> tuple[bytes, ...]:
    """The pages up to the end of a run."""
    pages: tuple[bytes, ...] = ()
    while leaf is not None:
        pages = runs[leaf].pages + pages
        leaf = runs[leaf].parent
    return pages


def check_runs(
    runs: dict[int, Run], leaves: dict[str, int | None], chains: dict[str, tuple[bytes, ...]]
) -> None:
    """Check that the runs are those of the chains: each page once, each count right."""
    assert {name: list_pages(runs, leaf) for name, leaf in leaves.items()} == chains
    pages = [page for run in runs.values() for page in run.pages]
    assert Counter(pages) == Counter({page for chain in chains.values() for page in chain})
    refs = Counter(leaf for leaf in leaves.values() if leaf is not None)
    refs.update(run.parent for run in runs.values() if run.parent is not None)
    assert {run.id: run.refs for run in runs.values()} == refs
