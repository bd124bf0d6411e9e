"""The committed stubs are what the committed .proto generates."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


# Name of the .proto file, its folder, and the package of its stubs.
PROTOS = [
    ("worker", "proto/kvrecall/v1", "kvrecall/protocol/v1"),
    ("sessions", "proto/kvrecall/sessions/v1", "kvrecall/protocol/sessions_v1"),
]


@pytest.mark.parametrize(("proto", "folder", "package"), PROTOS)
@pytest.mark.parametrize("name", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_stubs_are_what_the_proto_file_generates(
    tmp_path: Path, proto: str, folder: str, package: str, name: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{package}={folder}",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
    ]
    subprocess.run([*command, f"{package}/{proto}.proto"], cwd=ROOT, check=True)
    path = f"{package}/{proto}{name}"
    assert (tmp_path / path).read_text() == (ROOT / path).read_text(), (
        "run `make proto` and commit the result"
    )
