"""Recurrent states of the sessions in slots: one per layer, of a size that no token changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from workers.cache.devices import Devices, get_device
from workers.cache.layer_plan import LayerPlan


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a recurrent state.

    Attributes:
        layer: The model's layer.
        index: Number of the state in its layer.
        recurrent: True for the recurrence itself, False for the convolution's last inputs.
        shape: Of one session.
        dtype: Data type.
    """

    layer: int
    index: int
    recurrent: bool
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one session's tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def find_state_tensors(layers: Mapping[int, LinearAttentionLayer]) -> tuple[StateTensor, ...]:
    """Find the tensors that layers have after a pass, in the order of the layers."""
    return tuple(
        StateTensor(layer, index, recurrent, tuple(tensor.shape[1:]), tensor.dtype)
        for layer, own in sorted(layers.items())
        for index in range(own.number_of_states)
        for recurrent, tensor in (
            (False, own.conv_states[index]),
            (True, own.recurrent_states[index]),
        )
        if tensor is not None
    )


class StatePool:
    """The states of all slots, allocated once.

    A slot without a state is that of a session without a token.

    Attributes:
        nbytes: Bytes of one session's states.
    """

    def __init__(self, tensors: Sequence[StateTensor], slots: int, device: Devices) -> None:
        """Allocate the slots; device: of the model's layers."""
        self._tensors = tuple(tensors)
        self._pool = [
            torch.zeros(slots, *each.shape, dtype=each.dtype, device=get_device(device, each.layer))
            for each in tensors
        ]
        self._begun = [False] * slots
        self.nbytes = sum(each.nbytes for each in tensors)

    def clear(self, slot: int) -> None:
        """Return the slot to the state before the first token."""
        self._begun[slot] = False

    def copy(self, slot: int) -> tuple[Tensor, ...]:
        """Copy the slot's state on the device; no tensors before the first token."""
        return tuple(part[slot].clone() for part in self._pool) if self._begun[slot] else ()

    def put(self, slot: int, state: Sequence[Tensor]) -> None:
        """Give the slot a state that `copy` or `unpack` returned."""
        self._begun[slot] = bool(state)
        for part, tensor in zip(self._pool, state, strict=bool(state)):
            part[slot] = tensor.to(part.device, non_blocking=True)

    def begin(self, plan: LayerPlan, slots: list[int]) -> dict[int, LinearAttentionLayer]:
        """Build transformers' layers that continue from the slots' states, by layer.

        They hold copies: a pass that fails changes no state. All slots have a state, or none has.
        """
        begun = {self._begun[slot] for slot in slots}
        assert len(begun) == 1, "sessions with and without a token run in passes of their own"
        layers = {
            layer: LinearAttentionLayer(number_of_states=count)
            for layer, count in plan.states.items()
        }
        if begun == {True}:
            for each, part in zip(self._tensors, self._pool, strict=True):
                _continue(layers[each.layer], each, _gather(part, slots))
        return layers

    def keep(self, layers: Mapping[int, LinearAttentionLayer], slots: list[int]) -> None:
        """Keep the states that a pass over the slots has left in its layers."""
        for each, part in zip(self._tensors, self._pool, strict=True):
            own = layers[each.layer]
            tensor = (own.recurrent_states if each.recurrent else own.conv_states)[each.index]
            assert tensor is not None, "a pass has the states that the probe had"
            _scatter(part, slots, tensor)
        for slot in slots:
            self._begun[slot] = True

    def pack(self, state: Sequence[Tensor]) -> Tensor:
        """Join a state's bytes, uint8 `[nbytes]` on the host."""
        return torch.cat([part.contiguous().view(torch.uint8).flatten().cpu() for part in state])

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Split bytes that `pack` joined, uint8 `[nbytes]`."""
        parts = torch.split(packed, [each.nbytes for each in self._tensors])
        return tuple(
            part.clone().view(each.dtype).view(each.shape)
            for each, part in zip(self._tensors, parts, strict=True)
        )


def _gather(part: Tensor, slots: list[int]) -> Tensor:
    """Copy the slots' tensors, `[B, ...]`."""
    if (run := _find_run(slots)) is not None:
        return part[run].clone()
    return part[slots]


def _scatter(part: Tensor, slots: list[int], tensor: Tensor) -> None:
    """Copy `[B, ...]` to the slots."""
    if (run := _find_run(slots)) is not None:
        part[run].copy_(tensor)
    else:
        part[slots] = tensor.to(part.dtype)


def _find_run(slots: list[int]) -> slice | None:
    """Find the range that slots are; None for others. A range is copied several times as fast."""
    run = slice(slots[0], slots[0] + len(slots))
    return run if slots == list(range(run.start, run.stop)) else None


def _continue(layer: LinearAttentionLayer, which: StateTensor, tensor: Tensor) -> None:
    """Let a layer of transformers continue from a state, `[B, ...]`.

    The layer allocates a state of its own for each pass: none at all of a batch of no session.
    """
    if which.recurrent:
        layer.lazy_initialization(recurrent_states=tensor[:0], state_idx=which.index)
        layer.recurrent_states[which.index] = tensor
    else:
        layer.lazy_initialization(conv_states=tensor[:0], state_idx=which.index)
        layer.conv_states[which.index] = tensor
    layer.has_previous_state[which.index] = True
