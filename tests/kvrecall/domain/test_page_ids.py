"""Ids of pages: equal for equal tokens of one key and layout, and for nothing else."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.page_ids import (
    ID_BYTES,
    KEY_BYTES,
    PageNames,
    derive_page_key,
    derive_row_key,
    is_random,
    join_ids,
    make_random_id,
    split_ids,
)

SECRET = bytes(range(32))
NAMES = PageNames(derive_row_key(SECRET, "one"), b"a model", 4)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=24).map(lambda ids: ids[: len(ids) // 4 * 4])


@given(TOKENS, st.integers(0, 6))
def test_ids_do_not_depend_on_the_turns_that_brought_the_tokens(
    token_ids: list[int], pages: int
) -> None:
    whole = list(NAMES.extend(None, token_ids))
    first = list(NAMES.extend(None, token_ids[: 4 * pages]))
    rest = list(NAMES.extend(first[-1] if first else None, token_ids[4 * pages :]))
    assert first + rest == whole
    assert not any(map(is_random, whole))


@given(TOKENS, TOKENS)
def test_sessions_share_the_ids_of_their_common_prefix_alone(
    one: list[int], other: list[int]
) -> None:
    pages = [[ids[at : at + 4] for at in range(0, len(ids), 4)] for ids in (one, other)]
    common = 0
    for ours, theirs in zip(*pages, strict=False):
        if ours != theirs:
            break
        common += 1
    named = [list(NAMES.extend(None, ids)) for ids in (one, other)]
    assert named[0][:common] == named[1][:common]
    assert not set(named[0][common:]) & set(named[1][common:])


@pytest.mark.parametrize(
    "other",
    [
        replace(NAMES, key=derive_row_key(SECRET, "two")),
        replace(NAMES, key=derive_row_key(SECRET, "one", "a salt")),
        replace(NAMES, key=derive_row_key(bytes(32), "one")),
        replace(NAMES, key=derive_row_key(SECRET, "one", data_key=SECRET)),
        replace(NAMES, layout=b"another model"),
        replace(NAMES, page_tokens=2),
    ],
    ids=["tenant", "salt", "catalog", "encryption", "model", "page size"],
)
def test_nothing_is_shared_across(other: PageNames) -> None:
    tokens = list(range(8))
    assert not set(NAMES.extend(None, tokens)) & set(other.extend(None, tokens))


def test_a_tenant_and_a_salt_are_told_apart_wherever_one_ends() -> None:
    assert derive_row_key(SECRET, "ab", "c") != derive_row_key(SECRET, "a", "bc")


def test_pages_have_the_key_of_their_tenant_which_is_not_that_of_their_names() -> None:
    one, other = (bytes([byte] * KEY_BYTES) for byte in b"12")
    assert len(derive_page_key(one)) == KEY_BYTES
    keys = {derive_page_key(one), derive_page_key(other), one, derive_row_key(SECRET, "", "", one)}
    assert len(keys) == 4
    assert derive_page_key(None) == b""


def test_rows_that_are_not_a_full_caches_have_ids_of_their_own() -> None:
    tokens = list(range(8))
    exact = list(NAMES.extend(None, tokens))
    one, other = (list(NAMES.extend(exact[0], tokens[4:], exact=False)) for _ in range(2))
    assert is_random(one[0])
    assert len({exact[1], one[0], other[0]}) == 3


def test_what_follows_a_page_of_such_rows_is_never_shared() -> None:
    last = make_random_id()
    one, other = (list(NAMES.extend(last, [1, 2, 3, 4])) for _ in range(2))
    assert all(map(is_random, one + other))
    assert one != other


def test_a_part_of_a_page_has_no_id() -> None:
    with pytest.raises(ValueError, match="4 tokens each, got 3"):
        list(NAMES.extend(None, [1, 2, 3]))


@given(st.lists(st.binary(min_size=ID_BYTES, max_size=ID_BYTES)))
def test_joined_ids_are_split_as_they_were(ids: list[bytes]) -> None:
    assert split_ids(join_ids(ids)) == tuple(ids)


def test_a_part_of_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes each, got 17"):
        split_ids(bytes(17))
