"""The operator's keys, which wrap the data keys of tenants and the catalog's secret."""

import base64
import binascii
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LINE = f"NAME BASE64, with {KEY_BYTES} random bytes in base64: `kvrecall encryption new-key NAME` prints one"


@dataclass(frozen=True)
class Keyring:
    """Keys of KEY_BYTES by name. `current` names the one that wraps, the others only unwrap."""

    current: str
    keys: Mapping[str, bytes] = field(repr=False)


def make_line(name: str) -> str:
    """Make a new random key, as a line of a keys file. Raises ValueError for a name that is none."""
    if not _NAME.fullmatch(name):
        raise ValueError("a key's name has 1 to 64 letters, digits and . _ -")
    return f"{name} {base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}"


def parse_keyring(text: str) -> Keyring:
    """Parse a keys file: a key a line, the current one first; empty lines and `#` lines are skipped.

    Raises ValueError, which names the line and never shows a key.
    """
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name = words[0]
        if len(words) != 2 or not _NAME.fullmatch(name):
            raise ValueError(f"line {number} is no key; expected {_LINE}")
        if name in keys:
            raise ValueError(
                f"line {number} has a second key {name!r}; give each a name of its own"
            )
        keys[name] = _decode(number, name, words[1])
    if not keys:
        raise ValueError(f"there is no key in it; expected lines of {_LINE}")
    return Keyring(next(iter(keys)), keys)


def _decode(number: int, name: str, word: str) -> bytes:
    try:
        key = base64.b64decode(word, validate=True)
    except binascii.Error:
        raise ValueError(
            f"line {number}: key {name!r} is not in base64; expected {_LINE}"
        ) from None
    if len(key) != KEY_BYTES:
        raise ValueError(f"line {number}: key {name!r} has {len(key)} bytes; expected {_LINE}")
    return key
