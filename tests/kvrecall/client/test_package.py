"""Package `kvrecall`: public names, version, and an import without a server's dependencies."""

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

import kvrecall

SERVER_PACKAGES = ("fastapi", "grpc", "numpy", "pydantic", "torch", "transformers", "typer")


def test_the_public_names_are_sorted_and_exist() -> None:
    assert kvrecall.__all__ == sorted(kvrecall.__all__)
    assert all(hasattr(kvrecall, name) for name in kvrecall.__all__)
    assert kvrecall.__version__ == version("kvrecall")


def test_the_package_is_typed() -> None:
    assert files("kvrecall").joinpath("py.typed").is_file()


def test_the_client_needs_httpx_only() -> None:
    program = "import json, sys, kvrecall; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules = {name.partition(".")[0] for name in json.loads(found.stdout)}
    assert "httpx" in modules
    assert not modules & {*SERVER_PACKAGES, "gateway", "services", "workers", "kvstore"}
