"""Metadata URLs: what each form means, what is refused, and that no password gets out."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.errors import InvalidRequest
from dray.metadata.memory import MemoryStore
from dray.metadata.opening import (
    EtcdUrl,
    MemoryUrl,
    MetadataUrl,
    OxiaUrl,
    SqliteUrl,
    open_store,
    parse_metadata_url,
    redact,
)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("sqlite:///metadata.db", SqliteUrl(Path("metadata.db"))),
        ("sqlite:///./data/metadata.db", SqliteUrl(Path("data/metadata.db"))),
        ("sqlite:////var/lib/dray/metadata.db", SqliteUrl(Path("/var/lib/dray/metadata.db"))),
        ("sqlite:////srv/a%20b/what%3F.db", SqliteUrl(Path("/srv/a b/what?.db"))),
        ("sqlite:////srv/a b.db", SqliteUrl(Path("/srv/a b.db"))),
        ("etcd://h1", EtcdUrl(("h1:2379",))),
        ("etcd://h1:1,h2,[::1]:3", EtcdUrl(("h1:1", "h2:2379", "[::1]:3"))),
        ("etcd://h1:2379/", EtcdUrl(("h1:2379",))),
        ("etcd://h1:2379/team/blue/", EtcdUrl(("h1:2379",), "/team/blue")),
        ("etcd://h1/a%3Fb", EtcdUrl(("h1:2379",), "/a?b")),
        ("etcd://me:s%40c%3Aret@h1", EtcdUrl(("h1:2379",), user="me", password="s@c:ret")),
        ("etcd://me:@h1", EtcdUrl(("h1:2379",), user="me", password="")),
        (
            "etcd://me@h1?password_file=/run/secret",
            EtcdUrl(("h1:2379",), user="me", password_file=Path("/run/secret")),
        ),
        (
            "etcd://h1/p?tls=true&ca=ca.pem&cert=c.pem&key=k.pem&max_operations=512&max_request_bytes=10485760",
            EtcdUrl(
                ("h1:2379",),
                "/p",
                tls=True,
                ca=Path("ca.pem"),
                cert=Path("c.pem"),
                key=Path("k.pem"),
                max_operations=512,
                max_request_bytes=10485760,
            ),
        ),
        ("oxia://h", OxiaUrl("h:6648", "default", "dray/v1/")),
        ("oxia://h/", OxiaUrl("h:6648", "default", "dray/v1/")),
        ("oxia://10.0.0.1:7000/dray-c1", OxiaUrl("10.0.0.1:7000", "dray-c1", "dray/v1/")),
        ("oxia://h/default?prefix=team/blue", OxiaUrl("h:6648", "default", "team/blue/dray/v1/")),
        ("memory:", MemoryUrl()),
    ],
)
def test_url_means(url: str, parsed: MetadataUrl) -> None:
    assert parse_metadata_url(url) == parsed


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("", "scheme://"),
        ("metadata.db", "scheme://"),
        ("/var/lib/metadata.db", "scheme://"),
        ("h1:2379", "scheme://"),
        ("redis://h1", "sqlite:///, etcd:// or oxia://"),
        ("etcd+tls://h1", "sqlite:///, etcd:// or oxia://"),
        ("etcd://h1\n", "cannot be printed"),
        ("sqlite:", "name a file"),
        ("sqlite://", "name a file"),
        ("sqlite:///", "name a file"),
        ("sqlite:///data/", "name a file"),
        ("sqlite:///a%00b", "name a file"),
        ("sqlite://metadata.db", "a file has no host"),
        ("sqlite:///metadata.db?mode=ro", "no option 'mode'; this form takes none"),
        ("etcd://", "host or host:port"),
        ("etcd:///prefix", "host or host:port"),
        ("etcd://h1,,h2", "host or host:port"),
        ("etcd://h 1", "host or host:port"),
        ("etcd://::1", "host or host:port|a port is"),
        ("etcd://h1:", "a port is a number"),
        ("etcd://h1:0", "a port is a number"),
        ("etcd://h1:65536", "a port is a number"),
        ("etcd://h1:http", "a port is a number"),
        ("etcd://h1/a//b", "without empty segments"),
        ("etcd://h1?tsl=true", "no option 'tsl'; the options are tls, ca"),
        ("etcd://h1?tls=yes", "tls is true or false"),
        ("etcd://h1?tls", "once, as name=value"),
        ("etcd://h1?tls=", "once, as name=value"),
        ("etcd://h1?tls=true&tls=false", "once, as name=value"),
        ("etcd://h1?ca=ca.pem", "need tls=true"),
        ("etcd://h1?tls=true&cert=c.pem", "come together"),
        ("etcd://h1?max_operations=0", "max_operations is a number above 0"),
        ("etcd://h1?max_request_bytes=1MiB", "max_request_bytes is a number above 0"),
        ("etcd://me@h1", "a user needs a password"),
        ("etcd://me:secret@h1?password_file=f", "not both"),
        ("etcd://:secret@h1", "a password needs a user"),
        ("etcd://h1?password_file=f", "needs a user"),
        ("oxia://", "host or host:port"),
        ("oxia:///default", "host or host:port"),
        ("oxia://h1,h2", "host or host:port"),
        ("oxia://h:99999", "a port is a number"),
        ("oxia://h/dray/c1", "no '/'; to share one, add"),
        ("oxia://h/dray%2Fc1", "no '/'"),
        ("oxia://h/-x", "letters, digits"),
        ("oxia://h/a..b", "letters, digits"),
        ("oxia://me:secret@h", "not supported for Oxia"),
        ("oxia://h?tls=true", "no option 'tls'; the options are prefix"),
        ("memory://there", "write memory:"),
    ],
)
def test_bad_url_is_refused_saying_what_would_be_right(url: str, complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        parse_metadata_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///data/metadata.db", "sqlite:///data/metadata.db"),
        ("etcd://h1:2379,h2:2379/p?tls=true", "etcd://h1:2379,h2:2379/p?tls=true"),
        ("etcd://me@h1?password_file=/run/pw", "etcd://me@h1?password_file=/run/pw"),
        ("etcd://me:secret@h1:2379/p", "etcd://me:***@h1:2379/p"),
        ("etcd://me:sec@ret/secret?secret@h1/p", "etcd://me:***@h1/p"),
        ("etcd:me:secret@h1", "etcd:***@h1"),
        ("me:secret@h1", "me:***@h1"),
        ("rest+https://h/?warehouse=w&token=secret&x=1", "rest+https://h/?warehouse=w&token=***&x=***"),
        ("rest+https://h/?credential=id:secret", "rest+https://h/?credential=***"),
        ("s3://b?s3.secret-access-key=secret", "s3://b?s3.secret-access-key=***"),
        ("etcd://h/?PASSWORD=hunter2&Token=x&tls=true", "etcd://h/?PASSWORD=***&Token=***&tls=true"),
    ],
)
def test_redacted_url_shows_no_secret(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_parsed_url_shows_no_password() -> None:
    assert "secret" not in repr(parse_metadata_url("etcd://me:secret@h1"))


async def test_memory_store_is_opened() -> None:
    assert isinstance(await open_store("memory:"), MemoryStore)


async def test_sqlite_store_is_opened_where_the_url_says(tmp_path: Path) -> None:
    store = await open_store(f"sqlite:///{tmp_path}/a%20b.db")
    await store.close()
    assert (tmp_path / "a b.db").exists()


@pytest.mark.parametrize(
    ("option", "url"),
    [
        ("password_file", "etcd://me@127.0.0.1:1?password_file={missing}"),
        ("ca", "etcd://127.0.0.1:1?tls=true&ca={missing}"),
        ("key", "etcd://127.0.0.1:1?tls=true&cert={there}&key={missing}"),
    ],
)
async def test_file_named_in_the_url_must_be_readable(tmp_path: Path, option: str, url: str) -> None:
    there = tmp_path / "there"
    there.touch()
    with pytest.raises(InvalidRequest, match=f"{option}=.*missing: No such file"):
        await open_store(url.format(missing=tmp_path / "missing", there=there))
