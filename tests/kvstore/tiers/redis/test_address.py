"""Redis URLs are parsed; neither an address nor an error shows a password."""

import pytest

from kvstore.errors import TierSettingsError
from kvstore.tiers.redis.address import parse_address


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://here", "redis://here:6379"),
        ("redis://me:hunter2@here:1234/3", "redis://here:1234/3"),
        ("rediss://:hunter2@here", "rediss://here:6379"),
        ("redis://[::1]:7", "redis://::1:7"),
        ("unix:///run/redis.sock?password=hunter2", "unix:///run/redis.sock"),
        (
            "redis+sentinel://:hunter2@a:1,b/rows?sentinel_password=hunter2",
            "redis+sentinel://a:1,b:26379/rows",
        ),
        ("redis+cluster://me:hunter2@a,b:2", "redis+cluster://a:6379,b:2"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str) -> None:
    address = parse_address(url)
    assert str(address) == shown
    assert "hunter2" not in repr(address)


def test_users_and_passwords_are_decoded() -> None:
    address = parse_address("rediss+sentinel://m%40e:p%2Fw@a/rows?sentinel_password=s%23")
    assert (address.username, address.password, address.sentinel_password) == ("m@e", "p/w", "s#")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "here:6379",
        "http://:hunter2@here",
        "redis://",
        "redis+sentinel://:hunter2@a:1",
        "redis://here:hunter2",
        "redis://:hunt/er2@here",
        "redis://:hunt#er2@here",
        "redis://hunt:1?er2@here",
        "redis+cluster://:hunter2@",
        "redis://:hunter2@[::1",
        "redis+cluster://a,:hunter2",
    ],
)
def test_a_malformed_url_is_not_repeated_in_the_error(url: str) -> None:
    with pytest.raises(
        TierSettingsError, match="this Redis URL cannot be read: expected redis"
    ) as refused:
        parse_address(url)
    assert "hunt" not in str(refused.value)
