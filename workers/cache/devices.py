"""Devices of a model's layers."""

from collections.abc import Sequence

import torch

Devices = torch.device | str | Sequence[torch.device]
"""One device of all layers, or that of each."""


def list_devices(devices: Devices, n_layers: int) -> list[torch.device]:
    """List the device of each of so many layers."""
    if isinstance(devices, torch.device | str):
        return [torch.device(devices)] * n_layers
    assert len(devices) == n_layers, "one device per layer"
    return list(devices)


def get_device(devices: Devices, layer: int) -> torch.device:
    """Get the device of a layer."""
    return torch.device(devices) if isinstance(devices, torch.device | str) else devices[layer]
