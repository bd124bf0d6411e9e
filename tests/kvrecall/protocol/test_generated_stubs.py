"""The committed stubs are what the committed .proto generates."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["worker_pb2.py", "worker_pb2.pyi", "worker_pb2_grpc.py"])
def test_stubs_are_what_the_proto_file_generates(tmp_path: Path, name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-Ikvrecall/protocol/v1=proto/kvrecall/v1",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
    ]
    subprocess.run([*command, "kvrecall/protocol/v1/worker.proto"], cwd=ROOT, check=True)
    generated = (tmp_path / "kvrecall" / "protocol" / "v1" / name).read_text()
    assert generated == (ROOT / "kvrecall" / "protocol" / "v1" / name).read_text(), (
        "run `make proto` and commit the result"
    )
