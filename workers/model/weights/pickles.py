"""Formats of weights: safetensors alone is read, since reading a pickle may run code."""

from pathlib import Path

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
"""Names of weights that are pickles."""


def find_pickle(folder: Path) -> Path | None:
    """Find weights that are a pickle, in a folder that has none in safetensors."""
    if any(folder.glob("*.safetensors")):
        return None
    return next((found for name in PICKLES for found in sorted(folder.glob(name))), None)


def describe_pickle(pickle: Path) -> str:
    """Describe why weights are not read, and what to do."""
    return (
        f"its weights, {pickle.name}, are a pickle, which may run code when it is read; expected "
        "safetensors: where you trust the file, load the model with transformers or "
        "sentence-transformers elsewhere, and write it by its save_pretrained to a new folder"
    )
