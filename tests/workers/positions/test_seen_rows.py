"""Turned keys and turned queries: the same logits as keys that are rotated to where they are seen."""

import torch
from torch import Tensor

from tests.workers.positions.test_chunks import seen_by_definition
from workers.positions.chunks import Chunks
from workers.positions.rotation import Rotation
from workers.positions.seen_rows import SeenRows
from workers.positions.tables import RotationTables

CHUNKS = Chunks(100, 32)
ANGLES = (1.0, 0.3, 0.07, 0.002)
ROTATIONS = (
    Rotation(ANGLES),
    Rotation(ANGLES, interleaved=True),
    Rotation(ANGLES[:2], first=4, interleaved=True),
    Rotation(),
)
FIRSTS = (100, 131, 150, 230, 1000)
HEADS, DIM = 2, 8


def rotate(vectors: Tensor, positions: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair as a complex number, by the definition of RoPE; vectors `[heads, n, dim]`."""
    pairs = len(rotation.angles)
    turned = vectors.double().clone()
    for number, angle in enumerate(rotation.angles):
        at = rotation.first + (2 * number if rotation.interleaved else number)
        other = at + (1 if rotation.interleaved else pairs)
        pair = torch.complex(turned[..., at], turned[..., other])
        pair = pair * torch.exp(1j * positions.double() * angle)
        turned[..., at], turned[..., other] = pair.real, pair.imag
    return turned


def test_keys_are_turned_to_where_they_are_seen() -> None:
    tables = RotationTables(ROTATIONS)
    for first in FIRSTS:
        rows = torch.arange(first + 1)
        plain = torch.randn(HEADS, len(rows), DIM, generator=torch.Generator().manual_seed(first))
        placed = torch.tensor([CHUNKS.place(row) for row in rows.tolist()])
        wanted = torch.tensor([seen_by_definition(CHUNKS, row, first) for row in rows.tolist()])
        seen = SeenRows(tables, CHUNKS.find_segments(first))
        for layer, rotation in enumerate(ROTATIONS):
            computed = rotate(plain, placed, rotation).float()
            expected = rotate(plain, wanted, rotation).float()
            some = torch.stack([rows.flip(0), rows])
            turned = seen.turn(layer, computed.gather(1, some[..., None].expand(-1, -1, DIM)), some)
            torch.testing.assert_close(turned[0].flip(0), expected[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(turned[1], expected[1], atol=1e-4, rtol=0)
            torch.testing.assert_close(
                seen.turn_run(layer, computed[:, 7:], 7), expected[:, 7:], atol=1e-4, rtol=0
            )


def test_turned_queries_ask_the_keys_as_they_were_computed() -> None:
    tables = RotationTables(ROTATIONS)
    queries = torch.randn(HEADS, 3, DIM, generator=torch.Generator().manual_seed(1))
    for first in FIRSTS:
        keys = torch.randn(HEADS, first, DIM, generator=torch.Generator().manual_seed(first))
        seen = SeenRows(tables, CHUNKS.find_segments(first))
        for layer in range(len(ROTATIONS)):
            asked = seen.turn_queries(layer, queries)
            runs = torch.split(keys, seen.split(0, first), 1)
            found = torch.cat(
                [each @ run.mT for each, run in zip(asked, runs, strict=True)], dim=-1
            )
            expected = queries @ seen.turn_run(layer, keys).mT
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_of_the_pass_and_places_without_a_row_change_no_bit() -> None:
    seen = SeenRows(RotationTables(ROTATIONS), CHUNKS.find_segments(150))
    keys = torch.randn(HEADS, 2, DIM).bfloat16()
    positions = torch.tensor([[150, 2**31 - 1]] * HEADS, dtype=torch.int32)
    for layer in range(len(ROTATIONS)):
        assert torch.equal(seen.turn(layer, keys, positions), keys)
