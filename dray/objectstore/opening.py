"""From an object store URL to an open store: what each form means, and which module serves it.

    file:///path                a directory, absolute
    s3://bucket[/prefix][?endpoint=…&region=…&path_style=true|false&checksums=true|false]

`endpoint` is the address of a server that speaks S3 but is not AWS; it is addressed by path style unless
`path_style=false`. `checksums=false` is for such servers that refuse S3's checksum headers. Credentials are
never in the URL: boto3 finds them as the AWS tools do (environment, profile, role).

Parsing is pure; only `open_object_store` touches anything, and it imports a backend only when asked for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from dray.errors import InvalidObjectRequest, InvalidRequest
from dray.metadata.opening import UrlParts, redact, split_url
from dray.objectstore.store import ObjectStore, is_key

# A store that is asked to open says within this time what is wrong: somebody is looking at a terminal.
OPEN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class FileUrl:
    path: Path


@dataclass(frozen=True, slots=True)
class S3Url:
    bucket: str
    prefix: str  # of every key: "" or ends in "/"
    endpoint: str | None
    region: str | None
    path_style: bool
    checksums: bool


ObjectsUrl: TypeAlias = FileUrl | S3Url


def parse_objects_url(url: str) -> ObjectsUrl:
    """Raises `InvalidObjectRequest` saying which part is wrong and what would be right."""
    try:
        parts = split_url(url)
        match parts.scheme:
            case "file":
                return _parse_file_url(parts)
            case "s3":
                return _parse_s3_url(parts)
            case _:
                raise parts.bad("an object store URL begins with file:/// or s3://")
    except InvalidRequest as error:  # the metadata store's word for it: URLs are cut up by one module
        raise InvalidObjectRequest(str(error)) from None


async def open_object_store(url: str, timeout_s: float = 30.0) -> ObjectStore:
    """Open the store that `url` names, and see that it can be used; `timeout_s` is for every later call.

    Raises `InvalidObjectRequest` for the URL, and what `ObjectStore.check` raises, within 10 seconds.
    """
    place = redact(url)
    opening_s = min(timeout_s, OPEN_TIMEOUT_S)
    match parse_objects_url(url):
        case FileUrl(path):
            from dray.objectstore.file import FileObjectStore

            return await FileObjectStore.open(path, place, timeout_s=timeout_s, opening_s=opening_s)
        case S3Url() as s3:
            from dray.objectstore.s3 import S3ObjectStore

            return await S3ObjectStore.open(s3, place, timeout_s=timeout_s, opening_s=opening_s)


def _parse_file_url(parts: UrlParts) -> FileUrl:
    parts.check_options()
    path = unquote(parts.path)
    if parts.authority or not path.strip("/") or "\0" in path:
        raise parts.bad("name an absolute directory: file:///path")
    return FileUrl(Path("/" + path))


def _parse_s3_url(parts: UrlParts) -> S3Url:
    parts.check_options("endpoint", "region", "path_style", "checksums")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.authority):
        raise parts.bad("name a bucket (3 to 63 of a-z 0-9 . -): s3://bucket/prefix")
    endpoint = parts.options.get("endpoint")
    if endpoint is not None and not re.fullmatch(r"https?://[^/?#@]+/?", endpoint):
        raise parts.bad("endpoint is the http:// or https:// address of a server, without a path")
    region = parts.options.get("region")
    if region is not None and not re.fullmatch(r"[A-Za-z0-9-]+", region):
        raise parts.bad("region is a name such as eu-central-1")
    prefix = unquote(parts.path).strip("/")
    if prefix and not is_key(prefix):
        raise parts.bad("a prefix is a path without empty segments, '.' and '..'")
    return S3Url(
        bucket=parts.authority,
        prefix=f"{prefix}/" if prefix else "",
        endpoint=endpoint,
        region=region,
        path_style=_flag(parts, "path_style", default=endpoint is not None),
        checksums=_flag(parts, "checksums", default=True),
    )


def _flag(parts: UrlParts, option: str, default: bool) -> bool:
    value = parts.options.get(option)
    if value is None:
        return default
    if value not in ("true", "false"):
        raise parts.bad(f"{option} is true or false")
    return value == "true"
