"""Every setting, and the one place that reads the environment.

`Settings` is the table: each field carries its name, parser, default and one line of documentation, and
environment variables, command-line flags and reference pages are derived from it. A value comes from the
defaults, a YAML file, the environment or the command line, each overriding those before it, as the same
text everywhere: quoting in YAML changes nothing.

Whatever is wrong raises `ConfigError` before anything is opened.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from dray.errors import ConfigError, InvalidObjectRequest, InvalidRequest
from dray.metadata.cluster import MAX_NUM_DOMAINS
from dray.metadata.opening import (
    MemoryUrl,
    UrlParts,
    parse_metadata_url,
    parse_sqlite_url,
    redact,
    split_url,
)
from dray.objectstore.opening import parse_objects_url

ENV_PREFIX = "DRAY_"
# Read by the test suite and its tools, not by Dray.
FOREIGN_VARIABLES = re.compile(r"DRAY_TEST_.*|DRAY_CACHE")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody wrote it, and where: `origin` is for people, such as "dray.yaml line 3"."""

    name: str
    text: str
    origin: str


def _directory(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("it must be the path of a directory")
    return Path(text)


def _int_between(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ValueError(f"it must be a whole number from {low} to {high}")
        return int(text)

    return parse


def _metadata_url(text: str) -> str:
    if parse_metadata_url(text) == MemoryUrl():
        raise ValueError("a memory store dies with its process and is for tests only; use sqlite:///path")
    return text


def _objects_url(text: str) -> str:
    parse_objects_url(text)
    return text


def _catalog_url(text: str) -> str:
    if text == "none":
        return text
    parts = split_url(text)
    match parts.scheme:
        case "sqlite":
            parse_sqlite_url(parts)
        case "rest+http" | "rest+https":  # its options are the catalog's own properties
            _check_server(parts)
        case "glue":
            pass
        case _:
            raise parts.bad(
                "a catalog URL begins with sqlite:///, rest+http://, rest+https:// or glue://, or is none"
            )
    return text


def _check_server(parts: UrlParts) -> None:
    if not re.fullmatch(r"([^@]*@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", parts.authority):
        raise parts.bad(f"name the server as {parts.scheme}://host:port/")


@dataclass(frozen=True, slots=True)
class Setting:
    """What the table says about one setting."""

    name: str
    parse: Callable[[str], object]
    default: str | None  # may refer to {data} and {absolute_data}; None leaves it unset
    doc: str
    flag: str | None = None  # placeholder of a command-line option of its own

    @property
    def field(self) -> str:
        return self.name.replace(".", "_")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.field.upper()


def _about(*row: Any, **more: Any) -> dict[str, Setting]:
    return {"setting": Setting(*row, **more)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The URLs may hold passwords, so they are not in the `repr`."""

    data: Path = field(
        metadata=_about(
            "data",
            _directory,
            "./data",
            "Directory of everything embedded: metadata, objects and catalog.",
            flag="DIR",
        )
    )
    metadata: str = field(
        repr=False,
        metadata=_about(
            "metadata",
            _metadata_url,
            "sqlite:///{data}/metadata.db",
            "Metadata store: sqlite:///path, etcd://h1:2379,h2:2379/prefix or oxia://host:6648/namespace.",
            flag="URL",
        ),
    )
    objects: str = field(
        repr=False,
        metadata=_about(
            "objects",
            _objects_url,
            "file://{absolute_data}/objects",
            "Object store: file:///path or s3://bucket/prefix?endpoint=…&region=….",
            flag="URL",
        ),
    )
    catalog: str = field(
        repr=False,
        metadata=_about(
            "catalog",
            _catalog_url,
            "sqlite:///{data}/catalog.db",
            "Iceberg catalog: sqlite:///path, rest+http(s)://host:8181/?warehouse=…, glue://… or none.",
            flag="URL",
        ),
    )
    metadata_timeout_ms: int = field(
        metadata=_about(
            "metadata.timeout.ms",
            _int_between(100, 60_000),
            "5000",
            "Time within which a call to the metadata store ends, in a result or an error.",
        )
    )
    metadata_domains: int | None = field(
        metadata=_about(
            "metadata.domains",
            _int_between(1, MAX_NUM_DOMAINS),
            None,
            "Number of MetaDomains, fixed when the cluster is created: 16 unless set. May be left out later.",
        )
    )
    wal_segment_bytes: int = field(
        metadata=_about(
            "wal.segment.bytes",
            _int_between(64 * 2**10, 2**30),
            "8388608",
            "Size at which a WAL object is sealed.",
        )
    )
    wal_linger_ms: int = field(
        metadata=_about(
            "wal.linger.ms",
            _int_between(0, 60_000),
            "250",
            "Longest time that a batch waits for its WAL object to fill while another is on its way.",
        )
    )
    wal_buffer_bytes: int = field(
        metadata=_about(
            "wal.buffer.bytes",
            _int_between(2**20, 2**40),
            "268435456",
            "Most bytes of batches between acceptance and answer; above it, connections are not read.",
        )
    )


def _table() -> dict[str, Setting]:
    rows: list[Setting] = [of.metadata["setting"] for of in fields(Settings)]
    return {row.name: row for row in rows}


SETTINGS: Mapping[str, Setting] = _table()


def load_settings(
    config: Path | None = None,
    arguments: Iterable[Given] = (),
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Bring all sources together. `arguments` are in command-line order: the last one counts."""
    given: dict[str, Given] = {}
    sources = [_from_environment(environ), arguments]
    if config is not None:
        sources.insert(0, _from_file(config))
    for source in sources:
        for value in source:
            _check_name(value.name, value, SETTINGS)
            given[value.name] = value

    values = {name: _parse(SETTINGS[name], value) for name, value in given.items()}
    data = values.setdefault("data", _directory(SETTINGS["data"].default or ""))
    places = {"data": quote(str(data)), "absolute_data": quote(str(Path(str(data)).absolute()))}
    for setting in SETTINGS.values():
        if setting.name not in values:
            text = setting.default
            values[setting.name] = None if text is None else setting.parse(text.format_map(places))
    return Settings(**{SETTINGS[name].field: value for name, value in values.items()})  # type: ignore[arg-type]


def _from_file(path: Path) -> Iterator[Given]:
    """The settings of a YAML file: one flat mapping of names to plain values.

    Composed, not loaded, so that each value is the text that was written and knows its line.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError("--config", str(path), f"{error.strerror}; it must be a readable file") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError("--config", str(path), f"it must be a YAML file in UTF-8: {problem}") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("--config", str(path), "it must hold lines of the form 'name: value'")
    seen: set[str] = set()
    for key, value in root.value:
        origin = f"{path} line {key.start_mark.line + 1}"
        name = str(key.value)
        if not isinstance(value, yaml.ScalarNode):
            raise ConfigError(
                name,
                "a list or mapping",
                f"it must be one value, and names are written in full: metadata.timeout.ms (from {origin})",
            )
        if name in seen:
            raise ConfigError(name, redact(value.value), f"it is given twice in one file (from {origin})")
        seen.add(name)
        yield Given(name, value.value, origin)


def _from_environment(environ: Mapping[str, str]) -> Iterator[Given]:
    names = {setting.env: setting.name for setting in SETTINGS.values()}
    for variable, text in sorted(environ.items()):
        if variable.startswith(ENV_PREFIX) and not FOREIGN_VARIABLES.fullmatch(variable):
            _check_name(variable, Given(variable, text, "the environment"), names)
            yield Given(names[variable], text, variable)


def _check_name(name: str, given: Given, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ConfigError(
            name,
            redact(given.text),
            f"there is no such setting; did you mean {nearest}? (from {given.origin})",
        )


def _parse(setting: Setting, given: Given) -> object:
    try:
        return setting.parse(given.text)
    except (ValueError, InvalidRequest, InvalidObjectRequest) as error:
        # What `bad_url` writes begins with the URL, which `ConfigError` names anyway.
        expected = str(error).removeprefix(f"{redact(given.text)}: ")
        raise ConfigError(setting.name, redact(given.text), f"{expected} (from {given.origin})") from None
