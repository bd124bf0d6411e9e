"""Names of pages tell format, layout and id, so that stores share a Redis unseen."""

from dataclasses import replace

from kvstore.format.page import VERSION, PageLayout
from kvstore.tiers.redis.keys import RedisKeys
from tests.kvstore.page_ids import make_id


def test_a_name_has_namespace_format_layout_and_id(layout: PageLayout) -> None:
    keys = RedisKeys.build("rows", layout)
    assert keys.prefix.startswith(f"rows:{VERSION}:")
    assert keys.page(make_id(7)) == f"{keys.prefix}:p:{make_id(7).hex()}"
    assert keys.read_id(keys.page(make_id(7))) == make_id(7)
    assert keys.page(make_id(7)).startswith(keys.pages.removesuffix("*"))
    assert {keys.used, keys.counted} == {f"{keys.prefix}:used", f"{keys.prefix}:used:counted"}


def test_layouts_have_other_names(layout: PageLayout) -> None:
    others = [replace(layout, fingerprint="model B"), replace(layout, n_layers=4)]
    prefixes = {RedisKeys.build("rows", each).prefix for each in (layout, *others)}
    assert len(prefixes) == 3


def test_a_namespace_is_neither_a_hash_tag_nor_a_pattern(layout: PageLayout) -> None:
    keys = RedisKeys.build("a:{b}*?[c]", layout)
    assert keys.prefix.startswith("a%3A%7Bb%7D%2A%3F%5Bc%5D:")
