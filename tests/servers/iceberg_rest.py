"""An Iceberg REST catalog for tests: Iceberg's own reference server, from jars fetched once by Maven.

It keeps its port and its tables (in SQLite) over `kill` and `start`. It asks for no credentials and listens
on all interfaces, whatever it is told, so it runs only as long as a test. `Relay` stands before it and
answers what it is told to, after the server has done what was asked.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.servers.kafka import SHORT_LIVED_OPTIONS, ensure_jars
from tests.servers.process import ServerProcess, free_port
from tests.servers.s3 import S3Server

_POM = Path(__file__).parent / "iceberg_rest" / "pom.xml"


def ensure_iceberg_rest_jars() -> Path:
    match = re.search(r"<iceberg\.version>([^<]+)<", _POM.read_text())
    assert match is not None, "pom.xml names no Iceberg version"
    announcement = f"fetching the REST catalog of Iceberg {match[1]} (once; about a quarter of a minute)"
    return ensure_jars(f"iceberg-rest-{match[1]}", _POM, announcement)


class IcebergRestServer:
    """Tables lie where their makers say: in directories, or with `s3` in that server's buckets."""

    def __init__(self, directory: Path, s3: S3Server | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        # Names of properties: "_" stands for ".", "__" for "-".
        environment = {
            "REST_PORT": str(self.port),
            "URI": f"jdbc:sqlite:{directory / 'rest.db'}",
            "WAREHOUSE": f"file://{directory / 'warehouse'}",
            "JDBC_BUSY__TIMEOUT": "30000",
        }
        if s3 is not None:
            environment |= {
                "WAREHOUSE": f"s3://{s3.bucket}/rest",
                "IO__IMPL": "org.apache.iceberg.aws.s3.S3FileIO",
                "S3_ENDPOINT": s3.endpoint,
                "S3_PATH__STYLE__ACCESS": "true",
                "S3_ACCESS__KEY__ID": s3.access_key,
                "S3_SECRET__ACCESS__KEY": s3.secret_key,
                "CLIENT_REGION": s3.region,
            }
        argv = ["java", *SHORT_LIVED_OPTIONS, "-cp", f"{ensure_iceberg_rest_jars()}/*"]
        self._process = ServerProcess(
            [*argv, "org.apache.iceberg.rest.RESTCatalogServer"],
            directory / "rest.log",
            self._answers,
            {f"CATALOG_{name}": value for name, value in environment.items()},
            start_timeout_s=60,
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, *, address: str | None = None, options: Mapping[str, str] | None = None) -> str:
        """As the setting `catalog` wants it; with `address` through something in front of this server."""
        query = f"?{urlencode(options)}" if options else ""
        return f"rest+http://{address or self.address}/{query}"

    def start(self) -> None:
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def _answers(self) -> bool:
        try:
            with urlopen(f"http://{self.address}/v1/config", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False


class Relay:
    """HTTP in front of a server on loopback: passes everything on, and may tell another outcome."""

    def __init__(self, target: str) -> None:
        relay = self
        self._statuses: list[int] = []  # of the next commits, instead of what the server answers
        self.commits = 0  # that were passed on

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65_537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                onward = http.client.HTTPConnection(target, timeout=60)
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                onward.request(self.command, self.path, body, headers)
                answer = onward.getresponse()
                content, status = answer.read(), answer.status
                if self.command == "POST" and re.search(r"/namespaces/[^/]+/tables/[^/]+$", self.path):
                    relay.commits += 1
                    if relay._statuses:
                        status, content = relay._statuses.pop(0), b""
                self.send_response(status)
                for name, value in answer.getheaders():
                    if name.lower() in ("content-type", "content-encoding"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                onward.close()

            def log_message(self, format: str, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def answer_commits(self, *statuses: int) -> None:
        """The next ones, with these; the server will have done what was asked."""
        self._statuses += statuses

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
