"""Decode steps of a model in native code, over the slots and the rows that a forward pass names."""

import ctypes

import structlog
import torch
from torch import Tensor

from workers.cache.forward_step import ForwardStep
from workers.model.decoding.plan import NotCovered, read_weights
from workers.model.decoding.self_test import TestedModel, check_steps, check_structure
from workers.model.layers.attention import rescale
from workers.native.decoder import NativeDecoder, Slots
from workers.native.library import open_library
from workers.retrieval.retriever import LAYER_STEP
from workers.retrieval.sampling import ROTATIONS
from workers.retrieval.step import RetrievalStep

_log = structlog.get_logger(__name__)


class Decoder:
    """Computes passes of one new token a session, as the model's own layers do.

    A session's numbers depend neither on the other sessions nor on the number of threads.

    Attributes:
        level: Instructions that the native code was compiled for.
    """

    static = False

    def __init__(self, level: str, native: NativeDecoder, scale: float) -> None:
        """Compute with native code; scale: factor of the product of a query and a key."""
        self.level = level
        self._native = native
        self._scale = scale

    def takes(self, step: ForwardStep) -> bool:
        """True for a pass that it computes: all others are torch's.

        A pass of one token, of attention to active rows and to those that are drawn of stored ones.
        """
        retrieval = step.retrieval
        return (
            step.query_positions.shape[1] == 1
            and step.block_attention is None
            and not step.static
            and step.recurrent_states is not None
            and (
                retrieval is None
                or (isinstance(retrieval, RetrievalStep) and self._draws(retrieval, step))
            )
        )

    def forward(self, token_ids: Tensor, step: ForwardStep) -> Tensor:
        """Run `token_ids`, int64 `[B, 1]`, and append their rows: see `LoadedModel.forward`.

        Returns logits float32 `[B, 1, vocabulary]`.
        """
        retrieval = step.retrieval
        assert retrieval is None or isinstance(retrieval, RetrievalStep), "a pass that it takes"
        searched = None if retrieval is None else retrieval.searched_rows
        memory = step.cache.pool.get_memory(0)
        kept = step.recurrent_states
        assert kept is not None, "a pass that it takes"
        states = [(inputs.float(), sums) for inputs, sums in kept]
        decoded = self._native.decode(
            token_ids.flatten().contiguous(),
            step.query_positions.flatten(),
            Slots(memory.keys, memory.values, memory.positions, step.control),
            [None] * len(token_ids) if searched is None else searched,
            states,
            step.placement,
            observed=step.observe > 0,
        )
        for (inputs, _), (changed, _) in zip(kept, states, strict=True):
            if changed is not inputs:
                inputs.copy_(changed)
        if retrieval is not None:
            found = decoded.drawn[..., 0].sum((0, 2)).tolist()
            retrieval.count(found, decoded.attention_seconds)
        queries = decoded.queries
        step.take(decoded.rows, None if queries is None else rescale(queries, self._scale))
        return decoded.logits[:, None]

    def _draws(self, retrieval: RetrievalStep, step: ForwardStep) -> bool:
        searched = retrieval.searched_rows
        return searched is not None and all(
            each is None or each.rows.layout.dtype == step.cache.dtype for each in searched
        )


def open_decoder(model: TestedModel) -> Decoder | None:
    """Open native steps for a model; None, and why in the log, where torch computes them."""
    level, library = open_library(torch.backends.cpu.get_cpu_capability())
    try:
        if level is None or library is None:
            raise NotCovered("the native code was not built for this CPU")
        decoder = build_decoder(model, level, library)
    except NotCovered as reason:
        _log.info("native steps", runs=f"no: {reason}")
        return None
    _log.info("native steps", runs=f"for {level}")
    return decoder


def build_decoder(model: TestedModel, level: str, library: ctypes.CDLL) -> Decoder:
    """Build native steps for a model, and compare them with torch's; library: of a level of instructions.

    Raises NotCovered, also where they differ.
    """
    decoder = _build(model, level, library)
    difference = check_steps(model, decoder.forward)
    if difference is None and model.module.dtype != torch.float32:
        exact = _build(model, level, library, wide=True)
        difference = check_structure(model, exact.forward)
    if difference is not None:
        raise NotCovered(difference)
    return decoder


def _build(model: TestedModel, level: str, library: ctypes.CDLL, *, wide: bool = False) -> Decoder:
    """Build native steps, untested; wide: see `read_weights`."""
    weights = read_weights(model.module, model.plan, model.shape, wide=wide)
    return Decoder(level, NativeDecoder(library, weights, ROTATIONS, LAYER_STEP), weights.scale)
