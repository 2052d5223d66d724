"""A real S3 server for tests: versitygw, built once by Go at the version pinned beside this file.

It keeps buckets as directories, and its port and data over `kill` and `start`, so a test can take it away and
bring it back. Objects of its own bucket are reached by `url`; credentials come from the environment, as they
do for Dray: see `credentials`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from tests.servers.process import ServerProcess, accepts_connections, free_port

_MODULE = Path(__file__).parent / "versitygw"
_PACKAGE = "github.com/versity/versitygw"
# A cold build takes two minutes; a module download that hangs must not hang the tests for ever.
_BUILD_TIMEOUT_S = 900


def ensure_versitygw() -> Path:
    """The binary at the version in `versitygw/go.mod`, built into the cache if it is not there."""
    match = re.search(rf"{re.escape(_PACKAGE)} v(\S+)", (_MODULE / "go.mod").read_text())
    assert match is not None, "go.mod names no versitygw version"
    cache = Path(os.environ.get("DRAY_CACHE") or Path.home() / ".cache" / "dray")
    binary = cache / f"versitygw-{match[1]}"
    if binary.exists():
        return binary
    cache.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"building versitygw {match[1]} into {cache} (once; about two minutes)\n")
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
        built = Path(scratch) / binary.name
        command = ["go", "build", "-trimpath", "-o", str(built), f"{_PACKAGE}/cmd/versitygw"]
        done = subprocess.run(command, cwd=_MODULE, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"versitygw does not build:\n{done.stderr[-2000:]}")
        # Two test runs may build at once: each renames a whole binary into place.
        built.replace(binary)
    return binary


class S3Server:
    access_key = "dray-test"
    secret_key = "dray-test-secret"
    region = "us-east-1"
    bucket = "dray-test"

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        buckets = directory / "buckets"
        (buckets / self.bucket).mkdir(parents=True, exist_ok=True)  # a directory is a bucket
        argv = [
            str(ensure_versitygw()),
            f"--port=127.0.0.1:{self.port}",
            f"--access={self.access_key}",
            f"--secret={self.secret_key}",
            f"--region={self.region}",
            "--quiet",
            # Attributes of objects are extended ones of their files. With `--sidecar` they are other files,
            # and a kill of the server can leave one without the other.
            "posix",
            str(buckets),
        ]
        self._process = ServerProcess(
            argv, directory / "versitygw.log", lambda: accepts_connections(self.port)
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    def url(self, prefix: str, *, address: str | None = None, bucket: str | None = None) -> str:
        """Of objects below `prefix`; with `address` through a proxy in front of this server."""
        endpoint = f"http://{address or self.address}"
        return f"s3://{bucket or self.bucket}/{quote(prefix)}?endpoint={endpoint}&region={self.region}"

    @classmethod
    def credentials(cls) -> dict[str, str]:
        """The environment in which boto3 finds this server's credentials, and looks nowhere else."""
        return {
            "AWS_ACCESS_KEY_ID": cls.access_key,
            "AWS_SECRET_ACCESS_KEY": cls.secret_key,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
