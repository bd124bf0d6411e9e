"""An arena frees memory with the last reference to it, and never allocates it twice."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.arena import CHUNK, Arena, Buffer


def test_an_allocation_is_freed_with_its_last_reference() -> None:
    arena = Arena(256)
    part = arena.allocate(200)
    assert part is not None
    references = [torch.frombuffer(part.data[64:128], dtype=torch.uint8)[3:], part.data[7:9]]
    del part
    while references:
        assert (arena.allocate(1), arena.free_bytes) == (None, 0)
        del references[-1]
    assert arena.free_bytes == 256
    assert arena.allocate(256) is not None


def test_adjacent_free_stretches_are_merged() -> None:
    arena = Arena(4 * 64)
    parts = {slot: arena.allocate(64) for slot in range(4)}
    for slot in (0, 2, 1):
        assert arena.allocate(128) is None
        del parts[slot]
    assert arena.allocate(193) is None
    assert arena.allocate(192) is not None


@given(steps=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 7)), max_size=60))
def test_allocations_never_overlap(steps: list[tuple[int, int]]) -> None:
    arena = Arena(1024)
    parts: dict[int, tuple[int, Buffer]] = {}
    part: Buffer | None = None
    for number, (size, slot) in enumerate(steps):
        parts.pop(slot, None)
        if (part := arena.allocate(size)) is not None:
            part[:] = number % 256
            parts[slot] = number % 256, part
        assert all(bool((data == value).all()) for value, data in parts.values())
    parts.clear()
    del part
    assert arena.free_bytes == 1024


def test_free_memory_is_given_back_from_the_end_and_allocations_keep_theirs() -> None:
    arena = Arena(4 * CHUNK)
    parts = {slot: arena.allocate(CHUNK) for slot in range(4)}
    for number, part in parts.items():
        assert part is not None
        part[:] = number + 1
    del part
    assert arena.touched_bytes == 4 * CHUNK
    arena.trim(0)
    assert arena.touched_bytes == 4 * CHUNK, "all is allocated"
    del parts[0], parts[2]
    arena.trim(3 * CHUNK)
    assert arena.touched_bytes == 3 * CHUNK
    for number, part in parts.items():
        assert part is not None
        assert bool((part == number + 1).all())
    arena.trim(0)
    assert arena.touched_bytes == 2 * CHUNK
    again = arena.allocate(CHUNK)
    assert again is not None
    assert not again.any(), "the system gives empty memory again"
    assert arena.touched_bytes == 3 * CHUNK
