"""The object store contract on S3 and what speaks like it.

Every put sends a CRC-32C, which S3 verifies before the object appears and returns with whole gets, where it
is verified again. The lengths of all bodies are checked.

**Put-if-absent** is `If-None-Match: *`. A request whose answer was lost may have made the object, and
repeating it would be refused because of its own success. So such puts carry a random mark as user metadata,
and whoever is refused looks whether the object bears its mark: the bytes alone would not do, since another
may have put the same. Completing a put in parts is settled likewise.

**Puts in parts** appear when they are completed. The parts of one that failed or was cancelled are removed
in the background, after those under way have ended. Parts of a killed process stay, invisible, until a
lifecycle rule of the bucket removes them (`AbortIncompleteMultipartUpload`).
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError
from crc32c import crc32c

from dray.errors import (
    InvalidObjectRequest,
    ObjectDamaged,
    ObjectExists,
    ObjectNotFound,
    ObjectStoreError,
    ObjectStoreMisconfigured,
    ObjectStoreUnavailable,
    ObjectTooShort,
)
from dray.objectstore.health import Health, HealthTracker
from dray.objectstore.opening import S3Url
from dray.objectstore.s3_client import S3Client, error_code, http_status
from dray.objectstore.store import (
    MAX_KEY_BYTES,
    Body,
    ObjectInfo,
    check_key,
    check_list,
    check_range,
    cut,
    is_key,
    merge_ranges,
)
from dray.objectstore.threads import stop_if

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client as Boto
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

T = TypeVar("T")

# Above this a put goes in parts. WAL objects (8 MiB) and most Parquet files are put by one request, which is
# cheaper; S3 wants parts of 5 MiB at least and 10,000 at most.
MULTIPART_BYTES = 16 * 1024 * 1024
PART_BYTES = 8 * 1024 * 1024
MAX_PARTS = 10_000
# Of one put at a time, so that it leaves threads to others.
PARALLEL_PARTS = 4
PAGE = 1000  # what S3 lists or deletes in one request
CLEANING_S = 2.0  # how long closing waits for the parts of given-up puts to be removed
STEP_BYTES = 1024 * 1024  # read between two looks at whether anybody still waits
MARK = "dray-put"
# Some servers answer so to the deletion of what is not there, where S3 answers like to any other.
ABSENT = "NoSuchKey"
CONTENT_TYPE = "application/octet-stream"


class S3ObjectStore:
    def __init__(self, url: S3Url, client: S3Client, health: HealthTracker) -> None:
        self._bucket = url.bucket
        self._prefix = url.prefix
        self._checksums = url.checksums
        self._client = client
        self._health = health
        self._cleaning: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, url: S3Url, place: str, *, timeout_s: float, opening_s: float) -> S3ObjectStore:
        health = HealthTracker()
        client = await asyncio.to_thread(S3Client, url, place, timeout_s, health)
        store = cls(url, client, health)
        try:
            await client.read(lambda boto, _: store._look(boto), opening_s)
        except BaseException:
            await store.close()
            raise
        return store

    async def put(self, key: str, body: Body, *, if_absent: bool = False) -> None:
        name = self._name(key)
        view = memoryview(body).cast("B")
        if len(view) > MULTIPART_BYTES:
            await self._put_parts(key, name, view, if_absent)
        else:
            await self._put_whole(key, name, body if isinstance(body, bytes | bytearray) else view, if_absent)

    async def get(self, key: str) -> bytes:
        name = self._name(key)
        mode: dict[str, Any] = {"ChecksumMode": "ENABLED"} if self._checksums else {}

        def request(boto: Boto, abandoned: threading.Event) -> bytes:
            with _missing(key):
                answer = boto.get_object(Bucket=self._bucket, Key=name, **mode)
            body = _read(key, answer, abandoned)
            expected = answer.get("ChecksumCRC32C", "")
            # Others may have put it in parts: a checksum of checksums, which ends in "-" and their number.
            if expected and "-" not in expected and expected != _checksum(body):
                raise ObjectDamaged(f"{key}: the checksum of what arrived is not {expected}")
            return body

        return await self._client.read(request)

    async def get_range(self, key: str, start: int, end: int, *, clip: bool = False) -> bytes:
        check_range(start, end)
        name = self._name(key)

        def request(boto: Boto, abandoned: threading.Event) -> bytes:
            try:
                with _missing(key):
                    answer = boto.get_object(Bucket=self._bucket, Key=name, Range=f"bytes={start}-{end - 1}")
            except ClientError as error:
                if http_status(error) == 416:
                    raise ObjectTooShort(key, start, end, None) from None
                raise
            first, last, size = _content_range(key, answer)
            clipped = first == start and last == size < end
            if (first, last) == (start, end) or (clip and clipped and size > start):
                return _read(key, answer, abandoned)
            answer["Body"].close()
            if clipped:
                raise ObjectTooShort(key, start, end, size)
            raise ObjectDamaged(f"{key}: bytes {start} to {end} were asked for, {first} to {last} came")

        return await self._client.read(request)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        for start, end in ranges:
            check_range(start, end)
        reads = merge_ranges(ranges)
        bodies = await _all([self.get_range(key, start, end) for start, end in reads])
        return cut(ranges, reads, bodies)

    async def head(self, key: str) -> ObjectInfo:
        name = self._name(key)

        def request(boto: Boto, _: threading.Event) -> ObjectInfo:
            try:
                found = boto.head_object(Bucket=self._bucket, Key=name)
            except ClientError as error:
                if http_status(error) != 404:
                    raise
                self._look(boto)  # the answer to a HEAD does not say whether key or bucket is missing
                raise ObjectNotFound(key) from None
            return ObjectInfo(key, found["ContentLength"], _ms(found["LastModified"]))

        return await self._client.read(request)

    async def delete(self, key: str) -> None:
        name = self._name(key)

        def request(boto: Boto, _: threading.Event) -> None:
            try:
                boto.delete_object(Bucket=self._bucket, Key=name)
            except ClientError as error:
                if error_code(error) != ABSENT:
                    raise

        await self._client.write(request)

    async def delete_many(self, keys: Sequence[str]) -> dict[str, ObjectStoreError]:
        names = {self._name(key): key for key in keys}
        pages = [list(names)[at : at + PAGE] for at in range(0, len(names), PAGE)]
        failed: dict[str, ObjectStoreError] = {}
        for answer in await _all([self._delete_page(page) for page in pages]):
            failed.update({names[name]: error for name, error in answer.items()})
        return failed

    async def list(self, prefix: str = "", *, after: str = "", limit: int = 1000) -> list[ObjectInfo]:
        check_list(prefix, after, limit)
        found: list[ObjectInfo] = []
        while True:
            page, more = await self._page(prefix, after, min(PAGE, limit - len(found)))
            # Other programs keep "directories" and the like in buckets.
            found += [info for info in page if is_key(info.key)]
            if not more or len(found) >= limit:
                return found
            after = page[-1].key

    async def check(self) -> None:
        await self._client.read(lambda boto, _: self._look(boto))

    @property
    def health(self) -> Health:
        return self._health.state

    async def close(self) -> None:
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=CLEANING_S)
        await self._client.close()

    def _name(self, key: str) -> str:
        check_key(key)
        name = self._prefix + key
        if len(name.encode()) > MAX_KEY_BYTES:
            raise InvalidObjectRequest(
                f"key {key[:64]!r}… and the prefix {self._prefix!r} have more than {MAX_KEY_BYTES} bytes"
            )
        return name

    def _look(self, boto: Boto) -> None:
        # Not HeadBucket: the answer to a HEAD has no body, and so never says what is wrong.
        answer = boto.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
        if answer.get("Name") != self._bucket:
            raise ObjectStoreMisconfigured("objects: the server at endpoint= does not speak S3")

    async def _put_whole(self, key: str, name: str, body: Body, if_absent: bool) -> None:
        mark = secrets.token_hex(16)

        def request(boto: Boto, _: threading.Event) -> None:
            content: Any = bytes(body) if isinstance(body, memoryview) else body  # boto3 takes no memoryview
            more = self._checksum_of(content)
            if if_absent:
                more |= {"IfNoneMatch": "*", "Metadata": {MARK: mark}}
            try:
                boto.put_object(Bucket=self._bucket, Key=name, Body=content, ContentType=CONTENT_TYPE, **more)
            except ClientError as error:
                self._settle(boto, key, name, mark, error)

        await self._client.write(request)

    async def _put_parts(self, key: str, name: str, body: memoryview, if_absent: bool) -> None:
        mark = secrets.token_hex(16)
        how: dict[str, Any] = {"ContentType": CONTENT_TYPE, "Metadata": {MARK: mark}}
        if self._checksums:
            how |= {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}

        def create(boto: Boto, abandoned: threading.Event) -> dict[str, Any]:
            upload: dict[str, Any] = {"Bucket": self._bucket, "Key": name}
            upload["UploadId"] = boto.create_multipart_upload(**upload, **how)["UploadId"]
            if abandoned.is_set():
                boto.abort_multipart_upload(**upload)
            return upload

        upload = await self._client.write(create)
        size = max(PART_BYTES, -(-len(body) // MAX_PARTS))
        ended: list[threading.Event] = []  # one for each part that was ever under way
        free = asyncio.Semaphore(PARALLEL_PARTS)

        async def put_part(number: int) -> Any:
            part = body[(number - 1) * size : number * size]

            def request(boto: Boto, _: threading.Event) -> Any:
                end = threading.Event()
                ended.append(end)
                try:
                    content = bytes(part)
                    sums = self._checksum_of(content)
                    answer = boto.upload_part(**upload, PartNumber=number, Body=content, **sums)
                    return {"PartNumber": number, "ETag": answer["ETag"], **sums}
                finally:
                    end.set()

            async with free:
                return await self._client.write(request)

        def complete(boto: Boto, _: threading.Event) -> None:
            more = self._checksum_of(body)
            if more:
                more |= {"ChecksumType": "FULL_OBJECT"}
            if if_absent:
                more |= {"IfNoneMatch": "*"}
            try:
                boto.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, **more)
            except ClientError as error:
                self._settle(boto, key, name, mark, error)

        try:
            parts = await _all([put_part(number) for number in range(1, -(-len(body) // size) + 1)])
            await self._client.write(complete)
        except BaseException:
            task = asyncio.create_task(self._remove_parts(upload, ended))
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)
            raise

    async def _remove_parts(self, upload: dict[str, Any], ended: Sequence[threading.Event]) -> None:
        def request(boto: Boto, abandoned: threading.Event) -> None:
            for end in list(ended):
                while not end.wait(0.1):
                    stop_if(abandoned)
            boto.abort_multipart_upload(**upload)

        # Whether it works or not, the put has failed; what stays is what a killed process leaves too.
        with suppress(ObjectStoreError):
            await self._client.write(request)

    def _settle(self, boto: Boto, key: str, name: str, mark: str, error: ClientError) -> None:
        """Return if this very put succeeded, although the store refused to do it a second time."""
        refused = http_status(error) == 412
        if not refused and error_code(error) != "NoSuchUpload":
            raise error
        try:
            found = boto.head_object(Bucket=self._bucket, Key=name)
        except ClientError as missing:
            if http_status(missing) != 404:
                raise
            raise ObjectStoreUnavailable(f"{key}: it was put and deleted meanwhile") from None
        if found["Metadata"].get(MARK) == mark:
            return
        if refused:
            raise ObjectExists(key) from None
        raise ObjectStoreUnavailable(f"{key}: its parts are gone and the object there is another's") from None

    async def _delete_page(self, names: Sequence[str]) -> dict[str, ObjectStoreError]:
        """Those that failed. The store may refuse some of one request; only those are repeated."""
        left = list(names)
        failed: dict[str, ObjectStoreError] = {}

        def request(boto: Boto, _: threading.Event) -> None:
            failed.clear()
            answer = boto.delete_objects(
                Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in left], "Quiet": True}
            )
            for refused in answer.get("Errors", []):
                if refused.get("Code") == ABSENT:
                    continue
                reason: Any = {"Error": {"Code": refused.get("Code"), "Message": refused.get("Message")}}
                failed[refused["Key"]] = self._client.translate(ClientError(reason, "DeleteObjects"))
            left[:] = failed
            for error in failed.values():
                if isinstance(error, ObjectStoreUnavailable):
                    raise error

        try:
            await self._client.write(request)
        except ObjectStoreError as error:
            return {name: failed.get(name, error) for name in left}
        return failed

    async def _page(self, prefix: str, after: str, limit: int) -> tuple[Sequence[ObjectInfo], bool]:
        start: dict[str, Any] = {"StartAfter": self._prefix + after} if after else {}
        answer = await self._client.read(
            lambda boto, _: boto.list_objects_v2(
                Bucket=self._bucket, Prefix=self._prefix + prefix, MaxKeys=limit, **start
            )
        )
        infos = [
            ObjectInfo(found["Key"].removeprefix(self._prefix), found["Size"], _ms(found["LastModified"]))
            for found in answer.get("Contents", [])
        ]
        return infos, answer["IsTruncated"]

    def _checksum_of(self, content: Body) -> dict[str, Any]:
        return {"ChecksumCRC32C": _checksum(content)} if self._checksums else {}


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; after the first failure the others are cancelled."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


@contextmanager
def _missing(key: str) -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        # Not by its status: other things can be missing too.
        if error_code(error) in (ABSENT, "NotFound", "404"):
            raise ObjectNotFound(key) from None
        raise


def _read(key: str, answer: GetObjectOutputTypeDef, abandoned: threading.Event) -> bytes:
    body, left = answer["Body"], answer["ContentLength"]
    pieces = []
    try:
        while left:
            stop_if(abandoned)
            piece = body.read(min(left, STEP_BYTES))
            if not piece:
                raise ObjectDamaged(f"{key}: the body ended {left} bytes before its announced end")
            pieces.append(piece)
            left -= len(piece)
    finally:
        body.close()
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _content_range(key: str, answer: GetObjectOutputTypeDef) -> tuple[int, int, int]:
    """The half-open range that came, and the size of the object. A server without ranges sends all of it."""
    told = answer.get("ContentRange")
    if told is None:
        return 0, answer["ContentLength"], answer["ContentLength"]
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", told)
    if match is not None:
        first, last, size = map(int, match.groups())
        if last + 1 - first == answer["ContentLength"]:
            return first, last + 1, size
    answer["Body"].close()
    raise ObjectDamaged(f"{key}: the store calls {answer['ContentLength']} bytes the range {told!r}")


def _checksum(content: Body) -> str:
    return base64.b64encode(crc32c(content).to_bytes(4, "big")).decode()


def _ms(when: datetime) -> int:
    return int(when.timestamp() * 1000)
