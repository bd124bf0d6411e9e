"""The tree of page ids against sessions' pages as plain lists."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.catalog import page_tree
from tests.services.catalog.page_chains import StoredRuns, check_runs, list_pages, name_chain

NAMES = st.sampled_from("abcdef")
# Few tokens, so that sessions often begin alike.
TOKENS = st.lists(st.integers(0, 1), max_size=6)


class Sessions(RuleBasedStateMachine):
    """Sessions that begin, grow, fork and are deleted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = StoredRuns()
        self.tokens: dict[str, list[int]] = {}
        self.leaves: dict[str, int | None] = {}

    @rule(name=NAMES, more=TOKENS)
    def grow(self, name: str, more: list[int]) -> None:
        self._set(name, [*self.tokens.get(name, []), *more])

    @rule(name=NAMES, parent=NAMES, pages=st.integers(0, 12))
    def fork(self, name: str, parent: str, pages: int) -> None:
        if name not in self.tokens:
            self._set(name, self.tokens.get(parent, [])[:pages])

    @rule(name=NAMES, tokens=TOKENS)
    def replace(self, name: str, tokens: list[int]) -> None:
        self._set(name, tokens)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        before = self._pages()
        self.tokens.pop(name, None)
        dead = page_tree.drop(self.runs, self.leaves.pop(name, None))
        assert sorted(dead) == sorted(before - self._pages())

    @invariant()
    def runs_are_those_of_the_sessions(self) -> None:
        chains = {name: name_chain(tokens) for name, tokens in self.tokens.items()}
        check_runs(self.runs.by_id, self.leaves, chains)

    def _set(self, name: str, tokens: list[int]) -> None:
        before = self._pages()
        self.tokens[name] = tokens
        leaf = self.leaves.get(name)
        self.leaves[name], dead = page_tree.extend(self.runs, leaf, name_chain(tokens))
        assert sorted(dead) == sorted(before - self._pages())

    def _pages(self) -> set[bytes]:
        return {page for tokens in self.tokens.values() for page in name_chain(tokens)}


TestSessions = Sessions.TestCase


def test_the_rest_of_a_split_run_is_still_the_end_of_its_sessions() -> None:
    runs = StoredRuns()
    first, _ = page_tree.extend(runs, None, name_chain([0, 0, 0, 0]))
    second, _ = page_tree.extend(runs, None, name_chain([0, 0, 1]))
    assert list_pages(runs.by_id, first) == name_chain([0, 0, 0, 0])
    assert list_pages(runs.by_id, second) == name_chain([0, 0, 1])
    assert len(runs.by_id) == 3


def test_a_session_alone_is_one_run_however_many_turns_it_has() -> None:
    runs, leaf = StoredRuns(), None
    for length in range(1, 9):
        leaf, dead = page_tree.extend(runs, leaf, name_chain([0] * length))
        assert not dead
    assert len(runs.by_id) == 1
