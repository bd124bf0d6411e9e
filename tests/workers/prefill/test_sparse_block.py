"""A block's layers are sparse where the settings say so, and are reported."""

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from kvrecall.domain.settings.prefill import Prefill
from tests.workers.prefill.blocks import build_block, dense_output
from workers.cache.logits import Logits
from workers.prefill.block_rows import BlockRows
from workers.prefill.sparse_block import SparseBlock, SparseReport


def attend(block: SparseBlock, rows: BlockRows, layer: int = 0) -> Tensor | None:
    return block.attend(
        layer,
        rows.queries[None],
        rows.keys[None],
        rows.values[None],
        rows.positions[None],
        Logits(rows.scale),
    )


@pytest.mark.parametrize(
    ("sparse", "tokens", "rows", "applies"),
    [
        ("off", 512, 99_999, False),
        ("auto", 512, 1000, True),
        ("auto", 512, 999, False),
        ("auto", 63, 1000, False),
        ("on", 64, 100, True),
        ("on", 63, 99_999, False),
    ],
)
def test_a_layer_is_sparse_with_enough_tokens_and_rows(
    sparse: str, tokens: int, rows: int, applies: bool
) -> None:
    settings = TypeAdapter(Prefill).validate_python({"sparse": sparse, "min_rows": 1000})
    assert settings.is_sparse(tokens, rows) == applies


def test_a_layer_that_is_not_to_be_sparse_is_left_to_exact_attention() -> None:
    block = SparseBlock(Prefill(sparse="auto"), seed=1, first=200)
    assert attend(block, build_block()) is None
    assert block.report is None


def test_a_layer_without_lines_is_exact_and_reported_as_such() -> None:
    block = SparseBlock(Prefill(sparse="on", max_density=0.1), seed=1, first=1000)
    assert attend(block, build_block(old=1000, sharpness=0.01)) is None
    assert block.report == SparseReport(blocks=1, layers=1)


def test_a_report_has_the_least_and_the_mean_of_all_layers() -> None:
    rows = build_block(old=1000, columns=20)
    settings = Prefill(sparse="on", alpha=0.8)
    block = SparseBlock(settings, seed=1, first=1000)
    reports = []
    for layer in range(3):
        alone = SparseBlock(settings, seed=1, first=1000)
        out = attend(block, rows, layer)
        again = attend(alone, rows, layer)
        assert out is not None
        assert again is not None
        assert torch.equal(out, again)
        assert float((out[0] - dense_output(rows)).abs().max()) < 1
        assert alone.report is not None
        reports.append(alone.report)
    report = block.report
    assert report is not None
    assert (report.blocks, report.layers) == (1, 3)
    assert len({each.cover_mean for each in reports}) == 3, "each layer draws its own queries"
    assert report.cover_min == min(each.cover_min for each in reports)
    assert report.cover_mean == pytest.approx(sum(each.cover_mean for each in reports) / 3)
    assert report.density_mean == pytest.approx(sum(each.density_mean for each in reports) / 3)
    assert 0.8 <= report.cover_min <= report.cover_mean <= 1
    assert 0 < report.density_mean < 0.6


def test_means_of_blocks_are_weighted_by_their_layers() -> None:
    parts = [SparseReport(1, 3, 0.9, 0.96, 0.2), SparseReport(1, 1, 0.95, 1.0, 0.6), SparseReport()]
    joined = SparseReport.join(parts)
    assert (joined.blocks, joined.layers, joined.cover_min) == (2, 4, 0.9)
    assert joined.cover_mean == pytest.approx(0.97)
    assert joined.density_mean == pytest.approx(0.3)
    assert SparseReport.join([]) == SparseReport()
