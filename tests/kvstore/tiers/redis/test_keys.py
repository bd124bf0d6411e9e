"""The keys of a namespace have a format version, and an unknown one is refused."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from kvstore.errors import TierSettingsError
from kvstore.format.page import PageKey, PageLayout
from kvstore.tiers.redis.keys import KEY_FORMAT, RedisKeys
from kvstore.tiers.redis.tier import RedisTier

MakePage = Callable[..., tuple[PageKey, bytes]]


def test_the_first_page_marks_the_namespace(
    layout: PageLayout, make_page: MakePage, redis_server: Any, redis_url: str
) -> None:
    namespace = uuid4().hex
    marker = RedisKeys.build(namespace, layout).format
    tier = RedisTier(redis_url, layout, namespace=namespace)
    assert redis_server.client.get(marker) is None
    tier.put([make_page(0)])
    tier.close()
    assert redis_server.client.get(marker) == str(KEY_FORMAT).encode()
    RedisTier(redis_url, layout, namespace=namespace).close()


def test_pages_of_a_namespace_without_a_marker_are_read(
    layout: PageLayout, make_page: MakePage, redis_server: Any, redis_url: str
) -> None:
    namespace = uuid4().hex
    key, blob = make_page(0)
    tier = RedisTier(redis_url, layout, namespace=namespace)
    tier.put([(key, blob)])
    tier.close()
    redis_server.client.delete(RedisKeys.build(namespace, layout).format)
    again = RedisTier(redis_url, layout, namespace=namespace)
    assert again.get([key]) == [blob]
    again.close()


def test_a_namespace_of_another_key_format_is_refused(
    layout: PageLayout, redis_server: Any, redis_url: str
) -> None:
    namespace = uuid4().hex
    redis_server.client.set(RedisKeys.build(namespace, layout).format, KEY_FORMAT + 1)
    with pytest.raises(
        TierSettingsError,
        match=rf"namespace '{namespace}' of redis://\S+ has key format {KEY_FORMAT + 1}, "
        rf"but this kvrecall reads format {KEY_FORMAT}; use the kvrecall that wrote it",
    ):
        RedisTier(redis_url, layout, namespace=namespace)


def test_names_escape_what_would_break_a_hash_tag(layout: PageLayout) -> None:
    keys = RedisKeys.build("a:b", layout)
    assert keys.format == "a%3Ab:pages:format"
    assert keys.page(PageKey("s}{", 7)) == f"{keys.prefix}:{{s%7D%7B}}:7"
