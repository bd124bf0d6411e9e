"""The meter of computed tokens: counts by session and kind, until they are taken."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.usage import UsageMeter


def test_counts_are_taken_once_and_by_session() -> None:
    meter = UsageMeter()
    meter.add("s", "prefilled", 10)
    meter.add("s", "repaired", 3)
    meter.add("t", "prefilled", 5)
    assert meter.take("s") == pb.Usage(prefilled_tokens=10, repaired_tokens=3)
    assert meter.take("s") == pb.Usage()
    assert meter.take("t") == pb.Usage(prefilled_tokens=5)


def test_tokens_are_recounted_as_of_another_kind_and_none_is_added() -> None:
    meter = UsageMeter()
    meter.add("s", "prefilled", 10)
    meter.recount("s", "decoded", 1)
    meter.recount("s", "settled", 20)
    meter.recount("unknown", "decoded", 1)
    assert meter.take("s") == pb.Usage(decoded_tokens=1, settled_tokens=9)
    meter.recount("s", "decoded", 1)
    assert meter.take("s") == pb.Usage()
