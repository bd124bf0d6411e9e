"""The mark of a test that runs on each kind of server, with its fixtures of servers."""

import pytest

from faults.rig.redis_servers import KINDS

every_redis = pytest.mark.parametrize("redis_kind", KINDS, indirect=True)
