"""Pages and deletions that were flushed outlive a loss of power, in their order."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.format.page import PageHeader, PageId, seal
from kvstore.tiers.nvme.tier import NvmeTier
from tests.kvstore.page_ids import make_ids
from tests.kvstore.power_cut import PowerCut

IDS = make_ids(range(6))


def open_tier(directory: Path) -> NvmeTier:
    return NvmeTier(directory, segment_bytes=2000, compact_in_background=False)


def make_blob(page_id: PageId) -> bytes:
    payload = page_id * 30
    return seal(PageHeader(page_id, len(payload)), payload)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "put", "delete"]), st.sampled_from(IDS)),
        st.tuples(st.sampled_from(["flush", "move", "restart"]), st.just(b"")),
    ),
    max_size=40,
)


@given(steps=STEPS, share=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_what_was_flushed_is_left_and_what_was_deleted_is_gone(
    steps: list[tuple[str, PageId]], share: float
) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        power = PowerCut(os.fsync)
        patch.setattr(os, "fsync", power.fsync)
        tier = open_tier(Path(folder, "rows"))
        changed: set[PageId] = set()
        flushed: set[PageId] = set()
        for what, page_id in steps:
            if what == "put":
                tier.put([(page_id, make_blob(page_id))])
                changed.add(page_id)
            elif what == "delete":
                tier.delete([page_id])
                changed.add(page_id)
            elif what == "move":
                next(tier.compact(0.2), None)
            elif what == "restart":
                tier.close()
                tier = open_tier(Path(folder, "rows"))
            else:
                tier.flush()
                changed.clear()
                flushed = {each for each in IDS if tier.contains([each])[0]}
        power.restore(Path(folder, "left"), written=Path(folder, "rows"), share=share)
        tier.close()
        left = open_tier(Path(folder, "left"))
        left.check()
        found = {each for each in IDS if left.contains([each])[0]}
        assert found - changed == flushed - changed
        assert left.get(sorted(found)) == [make_blob(each) for each in sorted(found)]
        left.close()
