"""What layers beside those of managed rows hold of the sessions in slots: newest rows, and states."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.cache.active_cache import ActiveCache, SlotRows
from workers.cache.devices import Devices, list_devices
from workers.cache.layer_plan import LayerPlan
from workers.cache.slot_pool import KVShape
from workers.cache.state_pool import StatePool, StateTensor


@dataclass(frozen=True)
class SideShape:
    """What a model's layers keep beside managed rows.

    Attributes:
        plan: The model's layers.
        windows: Shape of the rows of layers with windows; None without such layers.
        states: Tensors of the recurrent states; empty without such layers.
    """

    plan: LayerPlan
    windows: KVShape | None = None
    states: tuple[StateTensor, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of one session's recurrent states."""
        return sum(each.nbytes for each in self.states)

    def keep_layers(self, layers: Collection[int]) -> "SideShape":
        """Keep what some of the layers keep."""
        windows = {i: window for i, window in self.plan.windows.items() if i in layers}
        states = tuple(each for each in self.states if each.layer in layers)
        return replace(self, plan=replace(self.plan, windows=windows), states=states)

    def get_slot_bytes(self, room: int, dtype: torch.dtype) -> int:
        """Bytes of one slot, for passes of `room` tokens at most."""
        if self.windows is None:
            return self.state_bytes
        rows = sum(window.size - 1 + room for window in self.plan.windows.values())
        return self.state_bytes + rows * self.windows.n_kv_heads * self.windows.row_bytes(dtype)


@dataclass(frozen=True)
class SlotSide:
    """A slot's side content in host memory."""

    windows: SlotRows | None
    state: tuple[Tensor, ...]


class SideCache:
    """The slots of an `ActiveCache`, of the layers that nothing is selected in.

    A window's rows are those that the next query sees, and up to `room` more: the newest are kept, and
    no other choice is made. Slots are claimed and released with those of the active rows.
    """

    def __init__(
        self,
        shape: SideShape,
        slots: int,
        room: int,
        dtype: torch.dtype,
        device: Devices,
    ) -> None:
        """Allocate the slots; room: tokens of the longest pass; device: of the model's layers."""
        self.shape = shape
        self.reach = tuple(shape.plan.windows.values())
        self._rows = [window.size - 1 + room for window in self.reach]
        self.windows: ActiveCache | None = None
        if shape.windows is not None:
            devices = list_devices(device, shape.plan.n_layers)
            own = [devices[layer] for layer in shape.plan.windows]
            self.windows = ActiveCache(shape.windows, slots, self._rows, dtype, own)
        self.states: StatePool | None = None
        if shape.states:
            self.states = StatePool(shape.states, slots, list_devices(device, shape.plan.n_layers))

    def claim(self, slot: int) -> None:
        """Take the slot that a session's active rows have taken."""
        if self.windows is not None:
            claimed = self.windows.claim(self._rows)
            assert claimed == slot, "slots of windows are those of the active rows"

    def release(self, slot: int) -> None:
        """Return the slot, empty."""
        if self.windows is not None:
            self.windows.release(slot)
        if self.states is not None:
            self.states.clear(slot)

    def copy(self, slot: int) -> SlotSide:
        """Copy a slot's content to the host."""
        windows = None if self.windows is None else self.windows.copy(slot)
        state = () if self.states is None else self.states.copy(slot)
        return SlotSide(windows, tuple(part.cpu() for part in state))

    def put(self, slot: int, content: object) -> None:
        """Give an empty slot a content that was copied from one."""
        assert isinstance(content, SlotSide), "a copy of a slot's side content"
        if self.windows is not None and content.windows is not None:
            for layer, rows in enumerate(content.windows.layers):
                self.windows.fill(slot, layer, rows)
        if self.states is not None:
            self.states.put(slot, content.state)

    def make_room(self, slot: int, length: int, tokens: int) -> None:
        """Drop what the next query, at position `length`, does not see, if `tokens` have no room."""
        if self.windows is None or self.windows.free_rows(slot) >= tokens:
            return
        for layer, window in enumerate(self.reach):
            self.windows.keep_from(slot, layer, window.first_seen(length))

    def drop_from(self, slot: int, length: int) -> None:
        """Drop the rows of windows from position `length` on."""
        if self.windows is not None:
            self.windows.drop_from(slot, length)

    def is_complete(self, slot: int, length: int) -> bool:
        """Check if the windows have all rows that a query at position `length` sees."""
        if self.windows is None:
            return True
        for layer, window in enumerate(self.reach):
            positions = self.windows.read(slot, layer).positions[0]
            first = max(0, window.first_seen(length))
            if int(((positions >= first) & (positions < length)).sum()) < length - first:
                return False
        return True

    def first_position(self, length: int) -> int:
        """Return the first position that a query at `length` sees in any window."""
        return max(0, min((window.first_seen(length) for window in self.reach), default=length))
