"""The committed gRPC stubs are what the committed .proto files generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

MESSAGES = ["python", "mypy"]
SERVICES = ["grpc_python", "mypy_grpc"]


@pytest.mark.parametrize(
    ("directory", "plugins", "names"),
    [
        ("dray/metadata/proto", MESSAGES + SERVICES, ["etcd", "oxia"]),
        ("dray/index", MESSAGES, ["entry"]),
    ],
)
def test_generated_modules_are_what_the_protos_say(
    tmp_path: Path, directory: str, plugins: list[str], names: list[str]
) -> None:
    """An edited module, or a .proto edited without `make proto`, would otherwise go unnoticed."""
    outputs = [f"--{plugin}_out={tmp_path}" for plugin in plugins]
    protos = [f"{directory}/{name}.proto" for name in names]
    # protoc finds the mypy plugins through PATH; they lie beside the interpreter.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos]
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)

    generated = {path.name: path.read_bytes() for path in (tmp_path / directory).iterdir()}
    assert len(generated) == len(names) * len(plugins)
    assert generated == {path.name: path.read_bytes() for path in (ROOT / directory).glob("*_pb2*.py*")}
