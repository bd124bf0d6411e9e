"""Decode steps as captured graphs: the host launches one in place of a pass's operators."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog
import torch
from torch import Tensor

from workers.cache.forward_step import ForwardStep
from workers.retrieval.kernel_step import KernelStep

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)

Forward = Callable[[Tensor, ForwardStep], Tensor]
"""As `LoadedModel.forward` for the last token's logits."""


class Capture(Protocol):
    """Captures work on a device, and returns what repeats it.

    Each repetition reads the tensors that the work has read, and overwrites those that it has returned.
    """

    def __call__(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Capture `work`, which may run any number of times meanwhile, or not at all."""


@dataclass(frozen=True, eq=False)
class _Inputs:
    """All tensors that change from step to step; described: of stored rows, if some are searched."""

    token_ids: Tensor
    positions: Tensor
    control: Tensor
    described: Tensor | None

    @classmethod
    def of(cls, token_ids: Tensor, step: ForwardStep) -> "_Inputs":
        """The inputs of a pass: `token_ids` int64 `[B, 1]`, on the device."""
        retrieval = _find_search(step)
        described = None if retrieval is None else retrieval.table.described
        return cls(token_ids, step.query_positions, step.control, described)

    def clone(self) -> "_Inputs":
        """Memory of a graph's own, which has the same in it."""
        described = None if self.described is None else self.described.clone()
        return _Inputs(
            self.token_ids.clone(), self.positions.clone(), self.control.clone(), described
        )

    def copy_(self, others: "_Inputs") -> None:
        """Take other inputs of these shapes."""
        self.token_ids.copy_(others.token_ids, non_blocking=True)
        self.positions.copy_(others.positions, non_blocking=True)
        self.control.copy_(others.control, non_blocking=True)
        if self.described is not None and others.described is not None:
            self.described.copy_(others.described, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Outputs:
    """What a pass gives beside the rows in its slots; queries, found: None where there are none."""

    logits: Tensor
    rows: Tensor
    queries: Tensor | None
    found: Tensor | None


@dataclass(frozen=True, eq=False)
class _Graph:
    inputs: _Inputs
    replay: Callable[[], _Outputs]


class CapturedSteps:
    """Computes passes of one new token a session by graphs, one for each batch's shapes; the least recently used go.

    The first pass of some shapes runs as it is, the second one is captured. Nothing waits for the device.

    Attributes:
        static: Passes have to be `ForwardStep.static`, so that many have the same shapes; False once a capture
            has failed, and none is tried any more.
    """

    def __init__(self, forward: Forward, capture: Capture, most: int) -> None:
        """Capture passes of `forward`; most: graphs that are kept, each with the memory of a pass."""
        self._forward = forward
        self._capture = capture
        self._most = most
        self.static = True
        # None: a pass of these shapes has run, and is captured the next time.
        self._graphs = OrderedDict[Hashable, _Graph | None]()

    def takes(self, step: ForwardStep) -> bool:
        """True for a pass that depends on nothing but its inputs: of one token, of attention and its kernels alone."""
        return (
            step.static
            and step.has_rows_alone
            and step.query_positions.shape[1] == 1
            and step.block_attention is None
            and step.placement is None
            and (step.retrieval is None or isinstance(step.retrieval, KernelStep))
        )

    def forward(self, token_ids: Tensor, step: ForwardStep) -> Tensor:
        """Run `token_ids`, int64 `[B, 1]`, and append their rows: see `LoadedModel.forward`.

        Returns logits float32 `[B, 1, vocabulary]`.
        """
        retrieval = _find_search(step)
        shapes = step.shapes, None if retrieval is None else retrieval.table.shapes
        token_ids = token_ids.to(step.cache.device, non_blocking=True)
        if shapes not in self._graphs:
            logits = self._forward(token_ids, step)
            if retrieval is None or retrieval.computed == step.cache.shape.n_layers:
                self._keep(shapes, None)
            return logits
        graph = self._graphs[shapes] or self._try_capture(token_ids, step)
        if graph is None:
            return self._forward(token_ids, step)
        self._keep(shapes, graph)
        graph.inputs.copy_(_Inputs.of(token_ids, step))
        out = graph.replay()
        # The next repetition overwrites what is returned while it may be read yet.
        step.take(out.rows.clone(), None if out.queries is None else out.queries.clone())
        if retrieval is not None and out.found is not None:
            retrieval.take(out.found.clone())
        return out.logits.clone()

    def _keep(self, shapes: Hashable, graph: _Graph | None) -> None:
        self._graphs[shapes] = graph
        self._graphs.move_to_end(shapes)
        while len(self._graphs) > self._most:
            self._graphs.popitem(last=False)

    def _try_capture(self, token_ids: Tensor, step: ForwardStep) -> _Graph | None:
        """Capture a pass; None, and no other is captured, where it is not possible."""
        try:
            return self._capture_pass(token_ids, step)
        except RuntimeError as error:
            self.static = False
            self._graphs.clear()
            _log.warning("captured steps", runs=f"no: {error}")
            return None

    def _capture_pass(self, token_ids: Tensor, step: ForwardStep) -> _Graph:
        """Capture a pass of a step's shapes; it holds nothing of the step's sessions."""
        inputs = _Inputs.of(token_ids, step).clone()
        retrieval = _find_search(step)
        searched = None if retrieval is None else retrieval.rebind(inputs.described)
        first = copy(step)
        first.retrieval = None

        def run() -> _Outputs:
            bound = first.rebind(inputs.positions, inputs.control)
            found = None if searched is None else searched.rebind(inputs.described)
            bound.retrieval = found
            logits = self._forward(inputs.token_ids, bound)
            queries = torch.stack(bound.observed) if bound.observed else None
            return _Outputs(logits, bound.rows, queries, None if found is None else found.found)

        return _Graph(inputs, self._capture(run))


def _find_search(step: ForwardStep) -> KernelStep | None:
    """Find the search by kernels of a pass, if it has one."""
    return step.retrieval if isinstance(step.retrieval, KernelStep) else None
