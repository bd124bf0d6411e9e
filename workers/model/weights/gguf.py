"""GGUF files as folders that `load_model` reads: bfloat16 safetensors, config and tokenizer."""

import fcntl
import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache as memoized
from pathlib import Path
from typing import Any

import gguf
import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.errors import ModelRefused
from workers.model.weights.gguf_file import get_conversion_folder, refuse_unusable, write_source

_SAMPLING = {
    "temperature": gguf.Keys.General.SAMPLING_TEMP,
    "top_p": gguf.Keys.General.SAMPLING_TOP_P,
    "top_k": gguf.Keys.General.SAMPLING_TOP_K,
    "min_p": gguf.Keys.General.SAMPLING_MIN_P,
    "repetition_penalty": gguf.Keys.General.SAMPLING_PENALTY_REPEAT,
}

_log = structlog.get_logger(__name__)


def find_conversion(file: Path, cache: Path) -> Path:
    """Find the folder that a GGUF file was converted to; convert the file if there is none.

    The folder is named by the digest of the whole file's content: a copy of the file, under any
    name, is not converted again, and a file that was replaced is. It appears under its name only
    when it is complete. Of several processes one converts, and the others wait for it.

    Args:
        file: The GGUF file.
        cache: Folder of all conversions; created where it is missing.

    Raises:
        ModelRefused: The file is missing, damaged, or of an architecture that transformers does
            not read, or the cache cannot be written.
    """
    refuse_unusable(file)
    try:
        folder = get_conversion_folder(file, cache)
        if folder.is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _convert_atomically(file, folder)
    except OSError as error:
        raise ModelRefused(
            f"{file} could not be converted: {error}; the conversion takes two bytes a weight under "
            f"{cache}, which KVRECALL_CACHE moves"
        ) from error
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write a GGUF file's model, in bfloat16, and its tokenizer to `folder`.

    What transformers loads from GGUF cannot be saved as it is: the weights are saved from a model
    that is built from the config without `quantization_config`. Raises ModelRefused.
    """
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
        "local_files_only": True,
    }
    try:
        with _parsing_once():
            loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(**source)
            sampling = _read_sampling(file)
    except OSError:
        raise
    except NotImplementedError as error:
        raise ModelRefused(f"{file} cannot be read by transformers: {error}") from error
    except ValueError as error:
        raise ModelRefused(_explain(file, error)) from error
    # A damaged file ends in whatever error its reader runs into first.
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, struct.error) as error:
        raise ModelRefused(_explain(file, error)) from error
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    build: Any = AutoModelForCausalLM.from_config  # untyped in transformers
    with torch.device("meta"):
        module = build(config, dtype=torch.bfloat16)
    module.load_state_dict(loaded.state_dict(), assign=True)
    module.tie_weights()
    module.generation_config = loaded.generation_config
    if sampling:
        module.generation_config.update(do_sample=True, **sampling)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_sampling(file: Path) -> dict[str, int | float]:
    """Read the sampling parameters that a file's metadata recommends, as transformers names them."""
    fields = gguf.GGUFReader(str(file)).fields  # as transformers names it: it is parsed once
    return {name: fields[key].contents() for name, key in _SAMPLING.items() if key in fields}


@contextmanager
def _parsing_once() -> Iterator[None]:
    """Let transformers parse a file's metadata, and build the table of its names, once.

    It parses the file for the config, the weights and the tokenizer each, in Python, and builds the
    table for every module: half of the time of a small model's conversion.
    """
    originals = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, original in originals.items():
        setattr(gguf, name, memoized(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


def _explain(file: Path, error: Exception) -> str:
    if "not supported" in str(error):
        return f"{file} is of a kind that transformers does not read: {error}"
    return (
        f"{file} is damaged or incomplete, download it again "
        f"({type(error).__name__}: {str(error) or 'no message'})"
    )


def _convert_atomically(file: Path, folder: Path) -> None:
    """Convert under a temporary name, then rename. The caller holds the conversion's lock."""
    _log.info("converting a GGUF file, once", file=str(file), folder=str(folder))
    started = time.perf_counter()
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    draft.mkdir()
    try:
        convert(file, draft)
        write_source(draft, file)
        _sync(draft)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    _log.info("GGUF file converted", seconds=round(time.perf_counter() - started, 1))


def _sync(folder: Path) -> None:
    """Write files and names to the disk: a loss of power must not leave a folder of empty files."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which the end of the process releases; wait for another holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
