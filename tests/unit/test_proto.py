"""The committed gRPC stubs are what the committed .proto files generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = Path("dray/metadata/proto")


def test_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    """An edited stub, or a .proto edited without `make proto`, would otherwise go unnoticed."""
    outputs = [f"--{plugin}_out={tmp_path}" for plugin in ("python", "grpc_python", "mypy", "mypy_grpc")]
    protos = [str(PROTO / name) for name in ("etcd.proto", "oxia.proto")]
    # protoc finds the mypy plugins through PATH; they lie beside the interpreter.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos]
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)

    generated = {path.name: path.read_bytes() for path in (tmp_path / PROTO).iterdir()}
    committed = {path.name: path.read_bytes() for path in (ROOT / PROTO).glob("*_pb2*.py*")}
    assert sorted(generated) == [
        "etcd_pb2.py",
        "etcd_pb2.pyi",
        "etcd_pb2_grpc.py",
        "etcd_pb2_grpc.pyi",
        "oxia_pb2.py",
        "oxia_pb2.pyi",
        "oxia_pb2_grpc.py",
        "oxia_pb2_grpc.pyi",
    ]
    assert generated == committed
