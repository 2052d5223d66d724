"""From a metadata URL to an open store: what each form means, and which module serves it.

    sqlite:///path              relative to the working directory
    sqlite:////path             absolute (three slashes end the empty host, as in SQLAlchemy)
    etcd://[user[:password]@]host[:2379][,host…][/prefix][?tls=true&ca=…&cert=…&key=…
            &password_file=…&max_operations=…&max_request_bytes=…]
                                keys begin with /prefix/dray/v1/
    oxia://host[:6648][/namespace][?prefix=…]
                                keys begin with prefix/dray/v1/
    memory:                     dies with the process; for tests

Names in a URL may be percent-encoded, and `@ / ? & %` in a user, password, prefix or path must be.
Parsing is pure; only `open_store` touches anything, and it imports a backend only when a URL asks for it.
No text that leaves this module holds a password.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote

from dray.errors import InvalidRequest
from dray.metadata.store import MetadataStore

if TYPE_CHECKING:
    import grpc

ETCD_PORT = 2379
OXIA_PORT = 6648

# Options whose values may be shown. All others are hidden: whoever mistypes `password` has still typed one.
HARMLESS_OPTIONS = (
    "tls", "ca", "cert", "key", "password_file", "max_operations", "max_request_bytes", "prefix",
    "endpoint", "region", "path_style", "warehouse",
)  # fmt: skip

# Where a cluster lies in an Oxia namespace; the number is the layout's, not Dray's.
LAYOUT_ROOT = "dray/v1/"


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    path: Path


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    endpoints: tuple[str, ...]  # "host:port", at least one
    prefix: str = ""  # of every key; "" or a path that begins with "/"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    max_operations: int | None = None  # None: what an unconfigured server accepts
    max_request_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OxiaUrl:
    address: str
    namespace: str
    root: str  # ends in "/"


@dataclass(frozen=True, slots=True)
class MemoryUrl:
    pass


MetadataUrl: TypeAlias = SqliteUrl | EtcdUrl | OxiaUrl | MemoryUrl


def parse_metadata_url(url: str) -> MetadataUrl:
    """Raises `InvalidRequest` saying which part is wrong and what would be right."""
    parts = split_url(url)
    parse = _PARSERS.get(parts.scheme)
    if parse is None:
        raise bad_url(url, "a metadata URL begins with sqlite:///, etcd:// or oxia://")
    return parse(parts)


async def open_store(url: str, timeout_s: float = 5.0) -> MetadataStore:
    """Open the store that `url` names; `timeout_s` bounds this and every later call to it.

    Raises `InvalidRequest` for the URL or a file that it names, and what the store raises.
    """
    match parse_metadata_url(url):
        case SqliteUrl(path):
            from dray.metadata.sqlite import SqliteStore

            return await SqliteStore.open(path, timeout_s=timeout_s)
        case EtcdUrl() as etcd:
            from dray.metadata.etcd import DEFAULT_MAX_OPERATIONS, DEFAULT_MAX_REQUEST_BYTES, EtcdStore

            return await EtcdStore.open(
                list(etcd.endpoints),
                etcd.prefix,
                timeout_s=timeout_s,
                user=etcd.user,
                password=await asyncio.to_thread(_password, etcd),
                tls=await asyncio.to_thread(_credentials, etcd),
                max_operations=etcd.max_operations or DEFAULT_MAX_OPERATIONS,
                max_request_bytes=etcd.max_request_bytes or DEFAULT_MAX_REQUEST_BYTES,
            )
        case OxiaUrl(address, namespace, root):
            from dray.metadata.oxia import OxiaStore

            return await OxiaStore.open(address, namespace, root, timeout_s=timeout_s)
        case MemoryUrl():
            from dray.metadata.memory import MemoryStore

            return MemoryStore()


def redact(url: str) -> str:
    """The URL without its secrets, fit for logs and errors. Works on malformed URLs too.

    It hides rather too much: a password with an unescaped `/` or `@` must not shine through.
    """
    url = re.sub(r":(?!//).*@", ":***@", url, flags=re.DOTALL)
    return re.sub(rf"([?&](?!(?:{'|'.join(HARMLESS_OPTIONS)})=)[^=&]*=)[^&]*", r"\1***", url)


@dataclass(frozen=True, slots=True)
class UrlParts:
    """A URL cut up but not yet decoded, except for its options."""

    url: str = field(repr=False)
    scheme: str
    authority: str
    path: str  # without the slash that ends the authority
    options: Mapping[str, str]

    def bad(self, expected: str) -> InvalidRequest:
        return bad_url(self.url, expected)

    def check_options(self, *known: str) -> None:
        for name in self.options:
            if name not in known:
                can = f"the options are {', '.join(known)}" if known else "this form takes none"
                raise self.bad(f"there is no option {name!r}; {can}")


def split_url(url: str) -> UrlParts:
    """Cut a URL of the form scheme://authority/path?name=value&…, or `scheme:`, raising `InvalidRequest`.

    Not `urllib.parse.urlsplit`: it drops tabs and newlines, and refuses or misreads a list of hosts.
    """
    if not url.isprintable():
        raise bad_url(url, "it holds a line break or another character that cannot be printed")
    before, _, query = url.partition("?")
    scheme, colon, rest = before.partition(":")
    if not (colon and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) and rest[:2] in ("", "//")):
        raise bad_url(url, "a URL has the form scheme://…")
    authority, _, path = rest[2:].partition("/")
    options: dict[str, str] = {}
    for option in query.split("&") if query else ():
        name, equals, value = option.partition("=")
        if not equals or not value or name in options:
            raise bad_url(url, f"option {name!r} must be given once, as name=value")
        options[name] = unquote(value)
    return UrlParts(url, scheme, authority, path, options)


def bad_url(url: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{redact(url)}: {expected}")


def parse_sqlite_url(parts: UrlParts) -> SqliteUrl:
    parts.check_options()
    if parts.authority:
        raise parts.bad("a file has no host: write sqlite:///relative/path or sqlite:////absolute/path")
    path = unquote(parts.path)
    if not path or path.endswith("/") or "\0" in path:
        raise parts.bad("name a file: sqlite:///relative/path or sqlite:////absolute/path")
    return SqliteUrl(Path(path))


def _parse_etcd_url(parts: UrlParts) -> EtcdUrl:
    parts.check_options("tls", "ca", "cert", "key", "password_file", "max_operations", "max_request_bytes")
    login, at, hosts = parts.authority.rpartition("@")
    user, colon, password = (unquote(part) for part in login.partition(":"))
    password_file = _file(parts, "password_file")
    if at and not user:
        raise parts.bad("a password needs a user: etcd://user:password@host")
    if user and bool(colon) == bool(password_file):
        raise parts.bad("a user needs a password, in the URL or with password_file=, not both")
    if password_file and not user:
        raise parts.bad("password_file= needs a user: etcd://user@host")
    tls = parts.options.get("tls", "false")
    if tls not in ("true", "false"):
        raise parts.bad("tls is true or false")
    ca, cert, key = (_file(parts, name) for name in ("ca", "cert", "key"))
    if (ca or cert or key) and tls == "false":
        raise parts.bad("ca, cert and key need tls=true")
    if bool(cert) != bool(key):
        raise parts.bad("cert and key come together")
    return EtcdUrl(
        endpoints=tuple(_endpoint(parts, host, ETCD_PORT) for host in hosts.split(",")),
        prefix="".join(f"/{segment}" for segment in _segments(parts, unquote(parts.path))),
        user=user or None,
        password=password if colon else None,
        password_file=password_file,
        tls=tls == "true",
        ca=ca,
        cert=cert,
        key=key,
        max_operations=_count(parts, "max_operations"),
        max_request_bytes=_count(parts, "max_request_bytes"),
    )


def _parse_oxia_url(parts: UrlParts) -> OxiaUrl:
    parts.check_options("prefix")
    if "@" in parts.authority:
        raise parts.bad("a login is not supported for Oxia")
    namespace = unquote(parts.path) or "default"
    if "/" in namespace:
        raise parts.bad("an Oxia namespace has no '/'; to share one, add ?prefix=…")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", namespace) or ".." in namespace:
        raise parts.bad("an Oxia namespace is made of letters, digits, '_', '-' and single dots")
    return OxiaUrl(
        address=_endpoint(parts, parts.authority, OXIA_PORT),
        namespace=namespace,
        root="".join(f"{segment}/" for segment in _segments(parts, parts.options.get("prefix", "")))
        + LAYOUT_ROOT,
    )


def _parse_memory_url(parts: UrlParts) -> MemoryUrl:
    parts.check_options()
    if parts.authority or parts.path:
        raise parts.bad("a memory store has no place: write memory:")
    return MemoryUrl()


_PARSERS: Mapping[str, Callable[[UrlParts], MetadataUrl]] = {
    "sqlite": parse_sqlite_url,
    "etcd": _parse_etcd_url,
    "oxia": _parse_oxia_url,
    "memory": _parse_memory_url,
}


def _endpoint(parts: UrlParts, host_port: str, default_port: int) -> str:
    # A bracketed IPv6 address, or a name without the characters that would start another part.
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(.*))?", host_port)
    if match is None:
        raise parts.bad("name each server as host or host:port, separated by commas where several may stand")
    host, port = match.groups()
    if port is None:
        return f"{host}:{default_port}"
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise parts.bad("a port is a number from 1 to 65535")
    return f"{host}:{int(port)}"


def _segments(parts: UrlParts, prefix: str) -> list[str]:
    prefix = prefix.strip("/")
    if "//" in prefix or "\0" in prefix:
        raise parts.bad("a prefix is a path without empty segments")
    return prefix.split("/") if prefix else []


def _file(parts: UrlParts, option: str) -> Path | None:
    value = parts.options.get(option)
    return None if value is None else Path(value)


def _count(parts: UrlParts, option: str) -> int | None:
    value = parts.options.get(option)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", value) or int(value) == 0:
        raise parts.bad(f"{option} is a number above 0")
    return int(value)


def _password(url: EtcdUrl) -> str | None:
    if url.password_file is None:
        return url.password
    # Files written by an editor or `echo` end in a line break that is no part of the password.
    try:
        return _read(url.password_file, "password_file").decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise InvalidRequest(f"password_file={url.password_file}: it must be text in UTF-8") from None


def _credentials(url: EtcdUrl) -> grpc.ChannelCredentials | None:
    if not url.tls:
        return None
    import grpc

    return grpc.ssl_channel_credentials(
        root_certificates=_read(url.ca, "ca") if url.ca else None,
        private_key=_read(url.key, "key") if url.key else None,
        certificate_chain=_read(url.cert, "cert") if url.cert else None,
    )


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{option}={path}: {error.strerror}") from None
