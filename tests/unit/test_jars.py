"""Jars: fetched whole or not at all, found again, and what people are told where they cannot be had."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dray.errors import JarsMissing
from dray.jars import Jar, ensure_jars

BODY = b"PK\x03\x04" + b"jar" * 100_000
JAR = Jar("org.example", "thing", "1.0", hashlib.sha256(BODY).hexdigest())
PATH = "/m2/org/example/thing/1.0/thing-1.0.jar"


class Repository(ThreadingHTTPServer):
    """A Maven repository that answers as it is told, one answer after the other; the last one stays."""

    def __init__(self) -> None:
        self.answers: list[int | bytes] = [BODY]  # a status, or as much of the body
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/m2"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Repository)
        self.server.asked.append(self.path)
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, int):
            self.send_error(answer)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Repository() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_jar_is_fetched_once(tmp_path: Path, repository: Repository) -> None:
    for _ in range(2):
        (path,) = ensure_jars([JAR], tmp_path / "cache", repository.url)
        assert path.read_bytes() == BODY
    assert repository.asked == [PATH]
    assert list(path.parent.iterdir()) == [path]


def test_what_maven_has_is_taken_from_there(tmp_path: Path, repository: Repository) -> None:
    local = tmp_path / "home/.m2/repository/org/example/thing/1.0/thing-1.0.jar"
    local.parent.mkdir(parents=True)
    local.write_bytes(BODY)
    (path,) = ensure_jars([JAR], tmp_path / "cache", repository.url)
    local.unlink()
    assert ensure_jars([JAR], tmp_path / "cache", repository.url) == [path]
    assert repository.asked == []


@pytest.mark.parametrize("first", [503, BODY[:1000], b"X" + BODY[1:]], ids=["busy", "cut", "changed"])
def test_a_fetch_that_went_wrong_is_done_again(
    tmp_path: Path, repository: Repository, first: int | bytes
) -> None:
    repository.answers = [first, BODY]
    (path,) = ensure_jars([JAR], tmp_path / "cache", repository.url)
    assert path.read_bytes() == BODY
    assert len(repository.asked) == 2


def test_a_jar_that_was_damaged_in_the_cache_is_fetched_anew(tmp_path: Path, repository: Repository) -> None:
    (path,) = ensure_jars([JAR], tmp_path / "cache", repository.url)
    path.write_bytes(BODY[:-1])
    ensure_jars([JAR], tmp_path / "cache", repository.url)
    assert path.read_bytes() == BODY


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(404, "the server answers 404"), (b"X" + BODY[1:], "another SHA-256"), (503, "the server answers 503")],
)
def test_a_jar_that_is_not_to_be_had_can_be_put_there(
    tmp_path: Path, repository: Repository, answer: int | bytes, reason: str
) -> None:
    repository.answers = [answer]
    wanted = tmp_path / "cache" / "jars" / "thing-1.0.jar"
    with pytest.raises(JarsMissing, match=reason) as caught:
        ensure_jars([JAR], tmp_path / "cache", repository.url)
    assert f"put it there by hand: {wanted}" in str(caught.value)
    assert f"{repository.url}/org/example" in str(caught.value)
    assert list(wanted.parent.iterdir()) == []
    wanted.write_bytes(BODY)
    assert ensure_jars([JAR], tmp_path / "cache", repository.url) == [wanted]


def test_without_a_network_the_reason_is_named(
    tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(JarsMissing, match="Connection refused"):
        ensure_jars([JAR], tmp_path / "cache", "http://127.0.0.1:9/m2")  # the discard port
