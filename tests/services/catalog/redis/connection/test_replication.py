"""What a server says of its replicas is read alike from both forms of the reply."""

from collections.abc import Mapping
from typing import Any

import pytest

from services.catalog.redis.connection.replication import Replication

SENT = (
    b"# Replication\r\nrole:master\r\nconnected_slaves:2\r\n"
    b"slave0:ip=127.0.0.1,port=7802,state=online,offset=14,lag=1,type=replica\r\n"
    b"slave1:ip=127.0.0.1,port=7803,state=wait_bgsave,offset=99,lag=0\r\n"
    b"master_replid:8177c7c6e064383d7ad6931a9c8d95c693ac42eb\r\nmaster_repl_offset:20\r\n"
)
PARSED = {
    "role": "master",
    "slave0": {"ip": "127.0.0.1", "port": 7802, "state": "online", "offset": 14, "lag": 1},
    "slave1": {"ip": "127.0.0.1", "port": 7803, "state": "wait_bgsave", "offset": 99},
    "master_replid": "8177c7c6e064383d7ad6931a9c8d95c693ac42eb",
    "master_repl_offset": 20,
}


@pytest.mark.parametrize("info", [SENT, PARSED])
def test_only_replicas_that_are_online_confirm(info: bytes | Mapping[str, Any]) -> None:
    found = Replication.read(info)
    assert found == Replication("8177c7c6e064383d7ad6931a9c8d95c693ac42eb", 20, (14,))
    assert found.has_replicas
    assert not found.has_copy(found)


def test_a_replica_has_a_copy_that_confirmed_what_was_written_in_the_same_history() -> None:
    written = Replication("a", 20, (14,))
    assert Replication("a", 30, (19, 20)).has_copy(written)
    assert not Replication("a", 30, (19,)).has_copy(written)
    assert not Replication("b", 30, (30,)).has_copy(written)
    assert not Replication("a", 30, ()).has_copy(written)
