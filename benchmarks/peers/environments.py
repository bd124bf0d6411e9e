"""Environments of peers, apart from kvrecall's own: made when they are needed first."""

import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.peers.errors import PeerFailed

_XLLAMACPP = "xllamacpp==2026.10.11549"
_NODE_LLAMA_CPP = "3.22.1"


def kvpress_python(path: Path) -> Path:
    """Python of the environment with kvpress, installed if the folder does not exist.

    torch comes first, in our version. kvpress needs another transformers than kvrecall.
    Raises PeerFailed.
    """
    torch_version = torch.__version__.split("+")[0]
    return python_with(path, [f"torch=={torch_version}"], ["kvpress", "transformers<5.3"])


def llama_server_python(path: Path) -> Path:
    """Python of the environment with llama.cpp's server as a wheel. Raises PeerFailed."""
    return python_with(path, [_XLLAMACPP])


def node_folder(path: Path) -> Path:
    """A folder with node-llama-cpp and its builds for x64 processors. Raises PeerFailed.

    Only packages are installed: nothing is compiled or downloaded by their scripts.
    """
    if not (path / "node_modules" / "@node-llama-cpp").exists():
        if shutil.which("npm") is None:
            raise PeerFailed("npm is not installed")
        path.mkdir(parents=True, exist_ok=True)
        (path / "package.json").write_text('{"private": true}\n', encoding="utf-8")
        for package in ("node-llama-cpp", "@node-llama-cpp/linux-x64"):
            options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]
            _run(["npm", "install", *options, f"{package}@{_NODE_LLAMA_CPP}"], path)
    return path


def python_with(path: Path, *steps: Sequence[str]) -> Path:
    """Python of a virtual environment; a new one gets the packages, step by step."""
    python = path / "bin" / "python"
    if not python.exists():
        venv.create(path, with_pip=True)
        try:
            for packages in steps:
                _run([str(python), "-m", "pip", "install", "--quiet", *packages], path)
        except PeerFailed:
            shutil.rmtree(path)  # the next run begins anew
            raise
    return python


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True)
    except subprocess.CalledProcessError as error:
        raise PeerFailed(f"{' '.join(command[-2:])} could not be installed") from error
