"""A decode step of a model in native code: one new token of each session."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from workers.native.attention import describe_searched, find_parts
from workers.native.decoder_weights import (
    AttentionWeights,
    DecoderWeights,
    DeltaWeights,
    LayerWeights,
    Matrix,
)
from workers.native.delta import DeltaLayer, DeltaShape, DeltaStates
from workers.native.layer import Layer
from workers.native.model import Model
from workers.native.searched import Searched
from workers.native.searched_rows import SearchedRows
from workers.native.step import Step
from workers.native.weight import Weight
from workers.positions.placement import Placement

# Numbers of weights and keys that are worth a thread: starting one takes as long as reading so many.
_NUMBERS_PER_THREAD = 1 << 19


@dataclass(frozen=True, eq=False)
class Slots:
    """Where the rows of a step's sessions are, and the new ones go.

    Attributes:
        keys: Of all slots, contiguous `[..., head_dim]`, float32 or bfloat16.
        values: As `keys`.
        positions: Of all rows, int32 `[...]`, those of the new ones included.
        control: Each head's first row, and its length before the step, int64
            `[2, row_layers, B, n_kv_heads]`.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    control: Tensor


@dataclass(frozen=True, eq=False)
class Decoded:
    """What a step has computed.

    Attributes:
        logits: float32 `[B, vocabulary]`.
        rows: The new rows, `[B, row_layers, 2, n_kv_heads, 1, head_dim]`.
        queries: With rotary embedding, `[row_layers, B, n_heads, 1, head_dim]`; None if not asked for.
        drawn: Number of rows that were drawn, and their positions, -1 for none, int32
            `[row_layers, B, n_kv_heads, 1 + most]`; overwritten by the next step.
        attention_seconds: Time of search and attention.
    """

    logits: Tensor
    rows: Tensor
    queries: Tensor | None
    drawn: Tensor
    attention_seconds: float


class NativeDecoder:
    """Computes steps of one model; for one thread at a time."""

    def __init__(
        self, library: ctypes.CDLL, weights: DecoderWeights, rotations: int, layer_rotation: int
    ) -> None:
        """Take the functions of a library, and a model.

        rotations, layer_rotation: ranks of drawn rows are rotated by less than that, and those of a layer by
        so much from those of the layer before.
        """
        self._functions = {
            torch.float32: library.decode_float32,
            torch.bfloat16: library.decode_bfloat16,
        }
        for function in (*self._functions.values(), library.decode_scratch):
            function.argtypes = [ctypes.POINTER(Step)]
            function.restype = None
        self._count_scratch = library.decode_scratch
        self._count_scratch.restype = ctypes.c_int64
        self._weights = weights
        self._rotations = rotations, layer_rotation
        self._layers = (Layer * len(weights.layers))(*map(_describe_layer, weights.layers))
        self._model = _describe(weights, self._layers)
        self._dim: int = self._model.dim
        self._row_layers: int = self._model.row_layers
        self._numbers = _count_numbers(weights)
        self._scratch = torch.empty(0)
        self._drawn = torch.empty(0, dtype=torch.int32)

    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Slots,
        searched: Sequence[SearchedRows | None],
        states: Sequence[tuple[Tensor, Tensor]] = (),
        placement: Placement | None = None,
        *,
        observed: bool = False,
    ) -> Decoded:
        """Append a token to each session, and compute the logits of the one after it.

        token_ids: int64 `[B]`; positions: int32 `[B]`, after those of all of the session's rows.
        searched: rows of each session's first layer, which has those of all; None for a session that
        retrieves nothing. states: of each delta net the convolution's last inputs, float32 `[B, channels, width]`, and
        the sums, float32 `[B, value heads, key dim, value dim]`, contiguous; those after the token take their place.
        placement: of a pass with sessions behind the model's window. observed: queries are
        returned.
        """
        weights, batch = self._weights, len(searched)
        n_layers, heads = self._row_layers, weights.n_kv_heads
        dtype = slots.keys.dtype
        queries = (n_layers, batch, heads * weights.group, 1, self._dim)
        most = max((each.count for each in searched if each is not None), default=0)
        out = Decoded(
            torch.empty(batch, weights.head.shape[0]),
            torch.empty(batch, n_layers, 2, heads, 1, self._dim, dtype=dtype),
            torch.empty(queries, dtype=dtype) if observed else None,
            self._take_drawn((n_layers, batch, heads, 1 + most)),
            0.0,
        )
        starts, lengths = slots.control
        layouts = (each.rows.layout for each in searched if each is not None)
        layer_bytes = next((find_parts(each, 1)[0] for each in layouts), 0)
        places = positions if placement is None else placement.query_positions.flatten()
        seen = [None] * batch if placement is None else placement.seen
        step = Step(
            ctypes.pointer(self._model),
            (Searched * batch)(*map(describe_searched, searched, seen)),
            layer_bytes,
            *self._rotations,
            *(each.data_ptr() for each in (token_ids, positions, places, starts, lengths)),
            *(each.data_ptr() for each in (slots.keys, slots.values, slots.positions, out.rows)),
            None if out.queries is None else out.queries.data_ptr(),
            *(out.logits.data_ptr(), out.drawn.data_ptr()),
            *(most, batch),
            self._describe_states(states),
        )
        active = int(lengths.sum()) * self._dim
        step.threads = self._count_threads(active, searched)
        size = self._count_scratch(step)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size)
        step.scratch = self._scratch.data_ptr()
        self._functions[dtype](step)
        return Decoded(out.logits, out.rows, out.queries, out.drawn, step.attention_ns * 1e-9)

    def _describe_states(
        self, states: Sequence[tuple[Tensor, Tensor]]
    ) -> "ctypes.Array[DeltaStates]":
        width = 0 if self._weights.delta is None else self._weights.delta.width
        assert all(inputs.shape[-1] == width for inputs, _ in states), "states of this model"
        pointers = [DeltaStates(inputs.data_ptr(), sums.data_ptr()) for inputs, sums in states]
        return (DeltaStates * len(states))(*pointers)

    def _take_drawn(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for what is drawn, which steps share."""
        size = shape[0] * shape[1] * shape[2] * shape[3]
        if len(self._drawn) < size:
            self._drawn = torch.empty(size, dtype=torch.int32)
        return self._drawn[:size].view(shape)

    def _count_threads(self, active: int, searched: Sequence[SearchedRows | None]) -> int:
        """Threads that are worth their start; active: numbers of the active rows' keys."""
        scored = sum(each.scored for each in searched if each is not None)
        keys = scored * self._weights.n_kv_heads * self._dim * self._row_layers
        worth = (self._numbers + active + keys) // _NUMBERS_PER_THREAD
        return max(1, min(torch.get_num_threads(), worth))


def _describe(weights: DecoderWeights, layers: "ctypes.Array[Layer]") -> Model:
    return Model(
        *(layers, len(layers)),
        sum(isinstance(each.mixer, AttentionWeights) for each in weights.layers),
        weights.gated,
        DeltaShape() if weights.delta is None else DeltaShape(*astuple(weights.delta)),
        Weight.of(weights.embedding),
        Weight.of(weights.head),
        *(weights.norm.data_ptr(), weights.frequencies.data_ptr()),
        weights.embedding.shape[1],
        weights.layers[0].up.shape[0],
        *(weights.n_kv_heads, weights.group, weights.head_dim),
        2 * len(weights.frequencies),
        *(weights.rotary_scale, weights.scale, weights.epsilon, weights.head_epsilon),
    )


def _describe_layer(layer: LayerWeights) -> Layer:
    mixer = layer.mixer
    own = Layer(
        gate=Weight.of(layer.gate),
        up=Weight.of(layer.up),
        down=Weight.of(layer.down),
        mixer_norm=layer.mixer_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
    )
    if isinstance(mixer, DeltaWeights):
        own.delta = ctypes.pointer(_describe_delta(mixer))
        return own
    own.queries, own.keys, own.values, own.out = map(Weight.of, _list_matrices(mixer))
    own.query_norm, own.key_norm = (
        None if norm is None else norm.data_ptr() for norm in (mixer.query_norm, mixer.key_norm)
    )
    return own


def _describe_delta(delta: DeltaWeights) -> DeltaLayer:
    return DeltaLayer(
        *map(Weight.of, _list_matrices(delta)),
        *(each.data_ptr() for each in (delta.kernel, delta.rates, delta.bias, delta.norm)),
    )


def _list_matrices(mixer: AttentionWeights | DeltaWeights) -> Sequence[Matrix]:
    if isinstance(mixer, AttentionWeights):
        return (mixer.queries, mixer.keys, mixer.values, mixer.out)
    return (mixer.mixed, mixer.gates, mixer.strengths, mixer.decays, mixer.out)


def _count_numbers(weights: DecoderWeights) -> int:
    """Numbers of the matrices that each step reads."""
    total = math.prod(weights.head.shape)
    for layer in weights.layers:
        total += sum(math.prod(each.shape) for each in _list_matrices(layer.mixer))
        total += 3 * math.prod(layer.up.shape)
    return total
