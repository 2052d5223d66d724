"""The Iceberg catalog that the setting `catalog` names, and the tables of topics in it.

    sqlite:///path                   an SQL catalog in one file, of the name `dray`
    rest+http(s)://host:port/path?…  a REST catalog; the options are PyIceberg's properties, as they are
    glue://[region]/?…               AWS Glue, likewise

Whoever has `none` asks for no catalog. A table lies at `<objects>/warehouse/<namespace>/<topic>-<id>`, beside
the WAL, so its files are read and written with the object store's endpoint, region and credentials
(`ObjectsFileIO`); properties in the catalog's URL, and credentials that a REST catalog hands out, go before
them.

**A table is ours** if it says so (`dray.topic-id`) and can still hold what we write. People may add columns,
rename and drop them, relax and widen them and partition otherwise: files are bound to columns by field id,
and a file may be added under any partition spec that the table ever had. What does not fit is `TableAltered`.

Everything here blocks: call it in a thread. What a catalog raises leaves this module as `CatalogError` only.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from uuid import UUID

import boto3
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)
from pyarrow.fs import FileSystem
from pydantic import ValidationError as MalformedAnswer
from pyiceberg.catalog import URI, WAREHOUSE_LOCATION, Catalog
from pyiceberg.catalog.glue import GlueCatalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import (
    AuthorizationExpiredError,
    CommitFailedException,
    CommitStateUnknownException,
    ForbiddenError,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    OAuthError,
    RESTError,
    ServerError,
    ServiceUnavailableError,
    TableAlreadyExistsError,
    TooManyRequestsError,
    UnauthorizedError,
)
from pyiceberg.io import PY_IO_IMPL
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO, pyarrow_to_schema
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.serializers import FromInputFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import TableRequirement, TableUpdate
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.typedef import EMPTY_DICT, Properties
from pyiceberg.types import IcebergType, IntegerType, LongType, NestedField, PrimitiveType
from requests import RequestException, Session
from requests.exceptions import InvalidURL
from sqlalchemy import URL
from sqlalchemy.exc import DatabaseError, OperationalError

from dray.columns.schema import FIELD_IDS, SCHEMA
from dray.errors import (
    CatalogDenied,
    CatalogMisconfigured,
    CatalogUnavailable,
    TableAltered,
    TableGone,
    TableOfAnotherTopic,
)
from dray.metadata.keys import escape
from dray.metadata.opening import UrlParts, parse_sqlite_url, redact, split_url
from dray.objectstore.opening import FileUrl, parse_objects_url

CATALOG_NAME = "dray"
# What `table.iceberg.partitioning` may be.
BY_PARTITION = "partition"
BY_PARTITION_AND_DAY = "partition,day(timestamp)"

TOPIC_ID = "dray.topic-id"
END_OFFSET = "dray.end-offset."
SCHEMA_VERSION = "dray.schema"
PROPERTIES = {
    SCHEMA_VERSION: "1",
    "format-version": "2",
    # The index names data files too, so Dray alone may delete any. Engines refuse to, then.
    "gc.enabled": "false",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}

# Of SQLite: how long a process waits for another's write, which is one row.
BUSY_S = 30
# Of a REST catalog. It may be slow to write metadata, but is not to be waited for for ever.
CONNECT_S = 10.0
ANSWER_S = 60.0
# Tables that the embedded catalog remembers as parsed. Some hundred KiB each, with a hundred snapshots.
REMEMBERED = 64
# Somebody made or dropped it between two looks: that does not happen so often in a row.
RACES = 5

_OURS = {field_id: pyarrow_to_schema(SCHEMA).find_field(field_id) for field_id in FIELD_IDS.values()}
_S3_SCHEMES = ("s3", "s3a", "s3n")


def open_catalog(catalog_url: str, objects_url: str) -> TopicTables:
    """Raises `InvalidRequest` for a bad URL and `CatalogError` for a catalog that cannot be used."""
    parts = split_url(catalog_url)
    place = redact(catalog_url)
    uri = objects_uri(objects_url)
    properties = {PY_IO_IMPL: f"{__name__}.{ObjectsFileIO.__name__}", **_file_properties(objects_url)}
    with talking(place):
        match parts.scheme:
            case "sqlite":
                catalog: Catalog = _open_sqlite(parts, {**properties, WAREHOUSE_LOCATION: f"{uri}/warehouse"})
            case "rest+http" | "rest+https":
                server = f"{parts.scheme.removeprefix('rest+')}://{parts.authority}/{parts.path}".rstrip("/")
                catalog = _Rest(CATALOG_NAME, **{**properties, URI: server, **parts.options})
            case "glue":
                region = {"glue.region": parts.authority} if parts.authority else {}
                properties |= {WAREHOUSE_LOCATION: f"{uri}/warehouse", **region, **parts.options}
                catalog = GlueCatalog(CATALOG_NAME, **properties)
            case _:
                raise parts.bad(
                    "a catalog URL begins with sqlite:///, rest+http://, rest+https:// or glue://"
                )
    return TopicTables(catalog, place, uri)


def table_key(namespace: str, topic: str, topic_id: UUID) -> str:
    """Where a table lies in the object store. No other table ever lies there, also not of the same name."""
    return f"warehouse/{escape(namespace)}/{escape(topic)}-{topic_id.hex[:8]}"


def objects_uri(objects_url: str) -> str:
    """What tables call the place of the object store; `<this>/<key>` is an object. Without an end slash.

    Iceberg's paths are not percent-encoded: engines take them as they are.
    """
    url = parse_objects_url(objects_url)
    uri = f"file://{url.path}" if isinstance(url, FileUrl) else f"s3://{url.bucket}/{url.prefix}".rstrip("/")
    if "?" in uri or "#" in uri:
        raise CatalogMisconfigured(
            f"objects {redact(objects_url)}: tables cannot lie below a name with '?' or '#'; use another one"
        )
    return uri


@dataclass(slots=True)
class TopicTable:
    """The table of one topic, as it was loaded last. Not for two threads at a time."""

    tables: TopicTables
    namespace: str
    topic: str
    topic_id: UUID
    table: Table
    created: bool  # by this call: the index may name files that the table had, and now lacks

    @property
    def name(self) -> str:
        return f"{self.namespace}.{self.topic}"

    def end_offset(self, partition: int) -> int:
        """How far the table has the partition; 0 if nothing of it was ever committed.

        Where the index names files up to a higher offset, the table was dropped and made anew: `append` them
        again, in order, before anything else of that partition.
        """
        return end_offset_of(self.table.metadata, partition)

    def load(self) -> None:
        """Raises `TableGone` if it was dropped, and otherwise as `TopicTables.ensure_table`."""
        uuid = self.table.metadata.table_uuid
        with talking(self.tables.place):
            try:
                self.table = self.tables.catalog.load_table(self.table.name())
            except NoSuchTableError:
                raise TableGone(self.name) from None
        if self.table.metadata.table_uuid != uuid:
            raise TableGone(self.name)
        check_table(self.name, self.table.metadata, self.topic_id)


class TopicTables:
    """The tables of all topics in one catalog. May be used by several threads."""

    def __init__(self, catalog: Catalog, place: str, uri: str) -> None:
        self.catalog = catalog
        self.place = place  # of the catalog, fit for logs
        self._uri = uri

    def ensure_table(
        self, namespace: str, topic: str, topic_id: UUID, *, partition_by: str = BY_PARTITION
    ) -> TopicTable:
        """The table of a topic, made if there is none. Whoever loses a race to make it takes the other's.

        Raises `TableOfAnotherTopic` and `TableAltered` for what somebody has to look at, and
        `CatalogUnavailable`, `CatalogDenied` or `CatalogMisconfigured`.
        """
        identifier = (*namespace.split("."), topic)
        name = f"{namespace}.{topic}"
        created = False
        for _ in range(RACES):
            with talking(self.place):
                try:
                    table = self.catalog.load_table(identifier)
                except NoSuchTableError:
                    try:
                        table = self._create(identifier, namespace, topic, topic_id)
                    except TableAlreadyExistsError:
                        continue
                    created = True
                check_table(name, table.metadata, topic_id)
                if partition_by == BY_PARTITION_AND_DAY and len(table.specs()) == 1:
                    try:
                        _partition_by_day(table)
                    except CommitFailedException:  # another does the same, or commits files
                        continue
                return TopicTable(self, namespace, topic, topic_id, table, created)
        raise CatalogUnavailable(f"table {name}: it is made, changed or dropped again and again")

    def find_table(self, namespace: str, topic: str, topic_id: UUID) -> TopicTable:
        """The table of a topic, as it is. Raises `TableGone` if there is none, and as `ensure_table`."""
        name = f"{namespace}.{topic}"
        with talking(self.place):
            try:
                table = self.catalog.load_table((*namespace.split("."), topic))
            except NoSuchTableError:
                raise TableGone(name) from None
        check_table(name, table.metadata, topic_id)
        return TopicTable(self, namespace, topic, topic_id, table, False)

    def set_aside(self, namespace: str, topic: str, found: str) -> str:
        """Rename the table of a topic that was deleted, and of which the id is `found`. Its new name."""
        name = f"{topic}_deleted_{found[:8]}"
        space = tuple(namespace.split("."))
        # Somebody else may have been faster; if not, loading the table tells.
        with talking(self.place), suppress(NoSuchTableError, TableAlreadyExistsError):
            self.catalog.rename_table((*space, topic), (*space, name))
        return name

    def close(self) -> None:
        self.catalog.close()

    def _create(self, identifier: tuple[str, ...], namespace: str, topic: str, topic_id: UUID) -> Table:
        by_partition = PartitionField(FIELD_IDS["partition"], 1000, IdentityTransform(), "partition")
        location = f"{self._uri}/{table_key(namespace, topic, topic_id)}"
        self._create_namespace(identifier[:-1])
        table = self.catalog.create_table(
            identifier,
            pyarrow_to_schema(SCHEMA),
            location=location,
            partition_spec=PartitionSpec(by_partition, spec_id=0),
            properties={**PROPERTIES, TOPIC_ID: str(topic_id)},
        )
        for column, field_id in FIELD_IDS.items():
            found = table.schema().find_column_name(field_id)
            if found != column:
                raise TableAltered(
                    ".".join(identifier),
                    f"the catalog made {found!r} of field {field_id}, which is {column!r}",
                    "use a catalog that numbers columns as Iceberg's own does",
                )
        return table

    def _create_namespace(self, namespace: tuple[str, ...]) -> None:
        for depth in range(1, len(namespace) + 1):  # some catalogs want those above to be there
            if self.catalog.namespace_exists(namespace[:depth]):
                continue
            try:
                self.catalog.create_namespace(namespace[:depth])
            except NamespaceAlreadyExistsError:
                pass
            except DatabaseError:  # the SQL catalog says so when another was faster
                if not self.catalog.namespace_exists(namespace[:depth]):
                    raise


def _partition_by_day(table: Table) -> None:
    """From here on. The spec before stays in the table, for files with records of several days."""
    timestamp = table.schema().find_column_name(FIELD_IDS["timestamp"])
    if timestamp is not None:
        table.update_spec().add_field(timestamp, DayTransform(), "timestamp_day").commit()


def end_offset_of(metadata: TableMetadata, partition: int) -> int:
    return int(metadata.properties.get(f"{END_OFFSET}{partition}", 0))


def check_table(name: str, metadata: TableMetadata, topic_id: UUID) -> None:
    """Whether it is the topic's table and takes our files. Raises `TableOfAnotherTopic` or `TableAltered`."""
    found = metadata.properties.get(TOPIC_ID)
    if found != str(topic_id):
        raise TableOfAnotherTopic(name, found, topic_id)
    version = metadata.properties.get(SCHEMA_VERSION, "1")
    if version != "1":
        raise TableAltered(name, f"{SCHEMA_VERSION} is {version}", "a newer Dray made it: upgrade this one")
    anew = "rename it, and the compactor makes a new one from all that the topic has"
    if metadata.format_version != 2:
        raise TableAltered(name, f"its format version is {metadata.format_version}, not 2", anew)
    schema = metadata.schema()
    for field_id in schema.field_ids:
        field = schema.find_field(field_id)
        ours = _OURS.get(field_id)
        if ours is None:
            if field.required and field.initial_default is None and _is_column(schema.fields, field_id):
                raise TableAltered(
                    name, f"column {field.name!r} is required, and we have no values", "make it optional"
                )
        elif not _takes(field.field_type, ours.field_type):
            raise TableAltered(
                name, f"column {field.name!r} has type {field.field_type}, not {ours.field_type}", anew
            )
        elif field.required and not ours.required:
            raise TableAltered(
                name, f"column {field.name!r} is required, and ours may be null", "make it optional again"
            )


def _is_column(columns: tuple[NestedField, ...], field_id: int) -> bool:
    return any(column.field_id == field_id for column in columns)


def _takes(theirs: IcebergType, ours: IcebergType) -> bool:
    if isinstance(theirs, LongType) and isinstance(ours, IntegerType):
        return True  # readers widen
    if isinstance(ours, PrimitiveType):
        return theirs == ours
    return type(theirs) is type(ours)  # what is inside has fields of its own


# --- what catalogs raise


@contextmanager
def talking(place: str) -> Iterator[None]:
    """Everything that PyIceberg raises, as what to do about it. Commits know better: see `commit`."""
    says = f"catalog {place}: "
    try:
        yield
    except (CommitFailedException, CommitStateUnknownException) as error:
        raise CatalogUnavailable(f"{says}others write to the same table: {error}") from error
    except (UnauthorizedError, ForbiddenError, AuthorizationExpiredError, OAuthError) as error:
        raise CatalogDenied(
            f"{says}{error}; correct the token or credential in the setting catalog, or its rights"
        ) from error
    except (ServiceUnavailableError, ServerError, TooManyRequestsError) as error:
        raise CatalogUnavailable(f"{says}{error}") from error
    except (RESTError, NoSuchNamespaceError, MalformedAnswer, InvalidURL, NotImplementedError) as error:
        raise CatalogMisconfigured(
            f"{says}{_short(error)}; is it an Iceberg REST catalog, and are path and warehouse right?"
        ) from error
    except RequestException as error:
        raise CatalogUnavailable(f"{says}{error}") from error
    except OperationalError as error:
        raise CatalogUnavailable(f"{says}{error.orig}") from error
    except DatabaseError as error:
        raise CatalogMisconfigured(f"{says}{error.orig}; name another file, or restore this one") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise CatalogDenied(f"{says}{error}; set AWS credentials, or a profile or role") from error
    except NoRegionError as error:
        raise CatalogMisconfigured(f"{says}{error}; name it as glue://<region>/") from error
    except (BotoCoreError, ClientError) as error:
        raise CatalogUnavailable(f"{says}{error}") from error
    except PermissionError as error:
        raise CatalogDenied(f"{says}{error}; give this process the right to it") from error
    except FileNotFoundError as error:
        raise CatalogUnavailable(
            f"{says}a file of the table's metadata is gone: {_short(error)}; if it stays so, restore it or"
            " drop the table from the catalog"
        ) from error
    except OSError as error:
        if "ACCESS_DENIED" in str(error):  # as PyArrow's S3 has it
            raise CatalogDenied(f"{says}{error}; correct the AWS credentials or their rights") from error
        raise CatalogUnavailable(f"{says}{error}") from error


def _short(error: Exception) -> str:
    """A malformed answer is quoted in full by those who parse it."""
    text = str(error)
    return text if len(text) <= 500 else f"{text[:500]}…"


# --- catalogs


def _open_sqlite(parts: UrlParts, properties: Mapping[str, str]) -> SqlCatalog:
    path = parse_sqlite_url(parts).path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    url = URL.create("sqlite", database=str(path), query={"timeout": str(BUSY_S)})
    for _ in range(RACES):
        try:
            return _Sql(CATALOG_NAME, **{**properties, URI: url.render_as_string()})
        except OperationalError as error:
            if "already exists" not in str(error):  # another process makes the same file
                raise
    raise CatalogUnavailable(f"catalog {redact(parts.url)}: its tables are made again and again")


class _Sql(SqlCatalog):
    """Knows what a metadata file says once it was parsed: such files never change."""

    def __init__(self, name: str, **properties: str) -> None:
        self._parsed: OrderedDict[str, TableMetadata] = OrderedDict()  # the one used last is last
        self._lock = threading.Lock()
        super().__init__(name, **properties)

    def _convert_orm_to_iceberg(self, orm_table: IcebergTables) -> Table:
        location = orm_table.metadata_location
        if not location:
            raise NoSuchTableError(f"{orm_table.table_namespace}.{orm_table.table_name} has no metadata")
        with self._lock:
            metadata = self._parsed.get(location)
        if metadata is None:
            source = self._load_file_io(EMPTY_DICT, location).new_input(location)
            metadata = FromInputFile.table_metadata(source)
            self._remember(location, metadata)
        return Table(
            identifier=(*self.identifier_to_tuple(orm_table.table_namespace), orm_table.table_name),
            metadata=metadata,
            metadata_location=location,
            io=self._load_file_io(metadata.properties, location),
            catalog=self,
        )

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        response = super().commit_table(table, requirements, updates)
        self._remember(response.metadata_location, response.metadata)
        return response

    def _remember(self, location: str, metadata: TableMetadata) -> None:
        with self._lock:
            self._parsed[location] = metadata
            self._parsed.move_to_end(location)
            if len(self._parsed) > REMEMBERED:
                self._parsed.popitem(last=False)


class _Rest(RestCatalog):
    """Does not wait for ever."""

    def _create_session(self) -> Session:
        session = super()._create_session()
        send: Callable[..., Any] = session.request
        session.request = partial(send, timeout=(CONNECT_S, ANSWER_S))  # type: ignore[method-assign]
        return session


# --- files


def _file_properties(objects_url: str) -> dict[str, str]:
    url = parse_objects_url(objects_url)
    if isinstance(url, FileUrl):
        return {}
    properties = {
        "s3.region": url.region or boto3.Session().region_name or "us-east-1",
        "s3.force-virtual-addressing": "false" if url.path_style else "true",
        "s3.connect-timeout": str(CONNECT_S),
        "s3.request-timeout": str(ANSWER_S),
    }
    return properties if url.endpoint is None else {**properties, "s3.endpoint": url.endpoint}


class ObjectsFileIO(PyArrowFileIO):
    """Files of tables, with the credentials that boto3 finds as it does for the object store.

    Those of a role expire: they are looked up at every use, and connections to S3 last as long as they do.
    What is written to a directory survives the loss of power before the catalog names it.
    """

    def __init__(self, properties: Properties = EMPTY_DICT) -> None:
        super().__init__(properties)
        self.fs_by_scheme = self._filesystem

    def new_output(self, location: str) -> PyArrowFile:
        scheme, netloc, path = self.parse_location(location, self.properties)
        if scheme == "file":
            return _DurableFile(location, path, self.fs_by_scheme(scheme, netloc))
        return super().new_output(location)

    def _filesystem(self, scheme: str, netloc: str | None) -> FileSystem:
        # Beside them are all properties of catalog and table, some of which change with every commit.
        properties = {
            name: value
            for name, value in self.properties.items()
            if name.startswith(("s3.", "client.", "gcs.", "adls.", "hdfs."))
        }
        given = ("s3.access-key-id", "client.access-key-id", "s3.anonymous", "s3.role-arn", "client.role-arn")
        if scheme in _S3_SCHEMES and not any(name in properties for name in given):
            properties |= _credentials()
        return _open_filesystem(scheme, netloc, frozenset(properties.items()))


@lru_cache(maxsize=16)
def _open_filesystem(scheme: str, netloc: str | None, properties: frozenset[tuple[str, str]]) -> FileSystem:
    return PyArrowFileIO(dict(properties))._initialize_fs(scheme, netloc)


def _credentials() -> dict[str, str]:
    found = _session().get_credentials()
    if found is None:
        raise NoCredentialsError
    frozen = found.get_frozen_credentials()
    named = {
        "s3.access-key-id": frozen.access_key,
        "s3.secret-access-key": frozen.secret_key,
        "s3.session-token": frozen.token,
    }
    return {name: value for name, value in named.items() if value}


@lru_cache(maxsize=1)
def _session() -> boto3.Session:
    return boto3.Session()  # it looks for credentials once, and renews those that expire


class _DurableFile(PyArrowFile):
    def __init__(self, location: str, path: str, fs: FileSystem) -> None:
        super().__init__(location, path, fs)
        self._local = Path(path)

    def create(self, overwrite: bool = False) -> _DurableStream:
        _make_directory(self._local.parent)
        return _DurableStream(self._local, "wb" if overwrite else "xb")


class _DurableStream(io.BufferedWriter):
    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(io.FileIO(path, mode))
        self._directory = path.parent

    def close(self) -> None:
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()
        _sync(self._directory)


def _make_directory(directory: Path) -> None:
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync(directory.parent)


def _sync(directory: Path) -> None:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
