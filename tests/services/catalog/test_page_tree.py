"""The tree of page ids against sessions' pages as plain lists."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.catalog import page_tree
from tests.services.catalog.page_chains import StoredNodes, check_tree, name_chain

NAMES = st.sampled_from("abcdef")
# Few tokens, so that sessions often begin alike.
TOKENS = st.lists(st.integers(0, 1), max_size=6)


class Sessions(RuleBasedStateMachine):
    """Sessions that begin, grow, fork, are rewritten and deleted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = StoredNodes()
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, bytes | None] = {}
        self.ever: set[bytes] = set()

    @rule(name=NAMES, more=TOKENS)
    def grow(self, name: str, more: list[int]) -> None:
        self._set(name, [*self.tokens.get(name, []), *more])

    @rule(name=NAMES, parent=NAMES, pages=st.integers(0, 12))
    def fork(self, name: str, parent: str, pages: int) -> None:
        if name not in self.tokens:
            self._set(name, self.tokens.get(parent, [])[:pages])

    @rule(name=NAMES, kept=st.integers(0, 6), more=TOKENS)
    def rewrite(self, name: str, kept: int, more: list[int]) -> None:
        self._set(name, [*self.tokens.get(name, [])[:kept], *more])

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.tokens.pop(name, None)
        page_tree.drop(self.nodes, self.last.pop(name, None))

    @invariant()
    def each_page_is_some_session_s_or_dead(self) -> None:
        chains = [name_chain(tokens) for tokens in self.tokens.values()]
        check_tree(self.nodes.tree, chains)
        assert self.nodes.dead == self.ever - self.nodes.tree.keys()

    def _set(self, name: str, tokens: list[int]) -> None:
        self.tokens[name] = tokens
        pages = name_chain(tokens)
        self.ever |= set(pages)
        self.last[name] = page_tree.replace(self.nodes, self.last.get(name), pages)


TestSessions = Sessions.TestCase


def test_a_session_that_begins_like_another_is_found_in_few_look_ups() -> None:
    asked = 0

    class CountingNodes(StoredNodes):
        def has(self, page: bytes) -> bool:
            nonlocal asked
            asked += 1
            return super().has(page)

    nodes = CountingNodes()
    page_tree.replace(nodes, None, name_chain([0] * 1000))
    asked = 0
    page_tree.replace(nodes, None, name_chain([0] * 1000 + [1]))
    assert asked <= 10
