"""Sparse prefill of a session: what its blocks left out, over a turn."""

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.cache.forward_step import ForwardStep
from workers.capabilities.capability import StepCapability
from workers.parallel.group import Group
from workers.prefill.sparse_block import SparseBlock, SparseReport


class SparsePrefill(StepCapability):
    """Reports of the turn's blocks; the blocks themselves are begun by `workers.generation.prefill`."""

    def __init__(self) -> None:
        self._reports: list[SparseReport] = []

    def clear_turn(self) -> None:
        """Forget the turn's blocks."""
        self._reports.clear()

    def end_pass(self, step: ForwardStep) -> None:
        """Add a sparse block, unless no layer was sparse."""
        block = step.block_attention
        if isinstance(block, SparseBlock) and (found := block.report) is not None:
            self._reports.append(found)

    def report(self, done: pb.TurnDone, group: Group) -> None:
        """Report the blocks that were prefilled sparsely, if any were."""
        if self._reports:
            joined = SparseReport.join(group.gather(SparseReport.join(self._reports)))
            done.prefill.CopyFrom(
                pb.PrefillReport(
                    blocks=len(self._reports),
                    cover_min=joined.cover_min,
                    cover_mean=joined.cover_mean,
                    density=joined.density_mean,
                )
            )
