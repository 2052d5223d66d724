"""How requests to S3 are sent: threads, connections, repeating, and what each error means.

boto3 blocks, so requests run in threads: one pool and one client for writes, another for reads, so that
readers catching up never keep a producer's put waiting. Each pool has as many connections as threads.

botocore's own repeating is off: it knows no deadline. Here a request is repeated, after a pause of full
jitter (uniform between nothing and a doubling limit), until its deadline; every request of `s3.py` may be.
What it raises decides: `ObjectStoreUnavailable` is tried again until the deadline, `ObjectDamaged` a few
times, and anything else is final.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ResponseStreamingError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from dray.errors import (
    ObjectDamaged,
    ObjectStoreDenied,
    ObjectStoreError,
    ObjectStoreFull,
    ObjectStoreMisconfigured,
    ObjectStoreUnavailable,
)
from dray.objectstore.health import HealthTracker
from dray.objectstore.opening import S3Url
from dray.objectstore.threads import ThreadPool

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client as Boto

T = TypeVar("T")

# S3 gives one connection some 80 MB/s: these fill a network card of 10 Gbit/s, and cost a thread stack each.
WRITE_THREADS = 16
READ_THREADS = 16
# The limit of the first pause; it doubles up to the last. AWS asks clients to slow down, not to go away.
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 5.0
# A connection that broke inside a body is bad luck; a body that is wrong each time is a damaged object.
DAMAGED_ATTEMPTS = 3
# What one try may take of a call's time, so that a dead connection leaves time for another.
ATTEMPT_SHARE = 1 / 3

# A request: given the client and an event that says that nobody waits any more.
Request: TypeAlias = Callable[["Boto", threading.Event], T]


class S3Client:
    def __init__(self, url: S3Url, place: str, timeout_s: float, health: HealthTracker) -> None:
        """Makes the boto3 clients, which reads files: call it in a thread."""
        self._place = place
        self._timeout_s = timeout_s
        self._health = health
        attempt_s = timeout_s * ATTEMPT_SHARE
        try:
            session = boto3.Session()
            self._boto_writes, self._boto_reads = (
                _boto(session, url, attempt_s, threads) for threads in (WRITE_THREADS, READ_THREADS)
            )
        except BotoCoreError as error:
            raise self.translate(error) from error
        except ValueError as error:  # an endpoint that is no address
            raise ObjectStoreMisconfigured(f"objects {place}: {error}") from error
        self._writes = ThreadPool("dray-s3-write", WRITE_THREADS)
        self._reads = ThreadPool("dray-s3-read", READ_THREADS)

    async def write(self, request: Request[T], timeout_s: float | None = None) -> T:
        return await self._call(self._writes, self._boto_writes, request, timeout_s or self._timeout_s)

    async def read(self, request: Request[T], timeout_s: float | None = None) -> T:
        return await self._call(self._reads, self._boto_reads, request, timeout_s or self._timeout_s)

    async def close(self) -> None:
        await asyncio.gather(self._writes.close(), self._reads.close())
        self._boto_writes.close()
        self._boto_reads.close()

    async def _call(self, pool: ThreadPool, boto: Boto, request: Request[T], timeout_s: float) -> T:
        def translated(abandoned: threading.Event) -> T:
            try:
                return request(boto, abandoned)
            except (BotoCoreError, ClientError) as error:
                raise self.translate(error) from error

        deadline_s = time.monotonic() + timeout_s
        last: ObjectStoreError | None = None
        damaged = 0
        for attempt in count():
            began_s = time.monotonic()
            try:
                result = await pool.run(translated, deadline_s - began_s)
            except TimeoutError:
                self._health.failed(began_s)
                raise self._too_late(timeout_s, last) from last
            except ObjectStoreUnavailable as error:
                self._health.failed(began_s)
                last = error
            except ObjectDamaged as error:
                self._health.succeeded()
                damaged += 1
                if damaged == DAMAGED_ATTEMPTS:
                    raise
                last = error
            except (ObjectStoreDenied, ObjectStoreMisconfigured):
                self._health.failed(began_s)
                raise
            except ObjectStoreError:
                self._health.succeeded()
                raise
            else:
                self._health.succeeded()
                return result
            pause_s = pause(attempt, random.random())
            if pool.closed or time.monotonic() + pause_s >= deadline_s:
                raise self._too_late(timeout_s, last) from last
            await asyncio.sleep(pause_s)
        raise AssertionError("the loop ends by its deadline")

    def _too_late(self, timeout_s: float, last: ObjectStoreError | None) -> ObjectStoreError:
        if last is None:
            return ObjectStoreUnavailable(f"objects {self._place}: no answer within {timeout_s:g} s")
        return ObjectStoreUnavailable(f"{last} (gave up after {timeout_s:g} s)")

    def translate(self, error: BotoCoreError | ClientError) -> ObjectStoreError:
        """What an error of botocore means to the caller. Errors that only one request knows are its own."""
        says = f"objects {self._place}: {error}"
        if isinstance(error, ClientError):
            return _translate_answer(error, says)
        cut_off = isinstance(error, ResponseStreamingError) and "IncompleteRead" in str(error)
        if cut_off or isinstance(error, IncompleteReadError | FlexibleChecksumError):
            return ObjectDamaged(says)
        if isinstance(error, _NO_CREDENTIALS):
            return ObjectStoreDenied(f"{says}; {_SET_CREDENTIALS}")
        if isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            return ObjectStoreMisconfigured(f"{says}; correct endpoint=, or set AWS_CA_BUNDLE")
        if isinstance(error, _NO_CONNECTION):
            return ObjectStoreUnavailable(says)
        return ObjectStoreMisconfigured(f"{says}; see that endpoint= is the address of an S3 server")


def pause(attempt: int, chance: float) -> float:
    """Full jitter: how long to wait after the failure of `attempt`, from 0; `chance` is from 0 to 1."""
    limit_s: float = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt, 16))
    return chance * limit_s


def _boto(session: boto3.Session, url: S3Url, attempt_s: float, connections: int) -> Boto:
    return session.client(
        "s3",
        endpoint_url=url.endpoint,
        # A server that is not AWS has no regions, but signatures need one.
        region_name=url.region or session.region_name or "us-east-1",
        config=Config(
            signature_version="s3v4",
            # urllib3 sends the body under the connect timeout, so it cannot be the shorter one.
            connect_timeout=attempt_s,
            read_timeout=attempt_s,
            max_pool_connections=connections,
            tcp_keepalive=True,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path" if url.path_style else "virtual"},
            # Ours are given with each request; botocore's own would be sent as trailers.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    TokenRetrievalError,
    SSOError,
    ProfileNotFound,
)
_NO_CONNECTION = (  # refused, reset, timed out, no such host
    BotoConnectionError,
    HTTPClientError,
    ResponseStreamingError,
)
_SET_CREDENTIALS = (
    "correct AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, "
    "or the profile or role they come from, or its rights"
)
_REPEAT = {  # by code, where the status says something else
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "RequestThrottled",
    "InternalError",
    "ServiceUnavailable",
    "OperationAborted",
    "ConditionalRequestConflict",
    "BadDigest",  # broken on the way there
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_DENIED = {
    "AccessDenied",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "UnrecognizedClientException",
    "XAdminUserNotFound",  # versitygw's word for InvalidAccessKeyId, with status 404
}
_FULL = {
    "QuotaExceeded",
    "NoSpaceLeftOnDevice",
    "InsufficientStorage",
    "StorageFull",
    "XMinioStorageFull",
    "EntityTooLarge",
}
_MISCONFIGURED = {
    "NoSuchBucket": "create the bucket or correct its name",
    "RequestTimeTooSkewed": "the clocks of this host and the store differ too much: synchronise them (NTP)",
    "AuthorizationHeaderMalformed": "correct region=",
    "PermanentRedirect": "correct region= or endpoint=",
    "IllegalLocationConstraintException": "correct region=",
    "InvalidBucketName": "correct the name of the bucket",
    "NotImplemented": "the server at endpoint= lacks what Dray needs",
}


def _translate_answer(error: ClientError, says: str) -> ObjectStoreError:
    code = error_code(error)
    status = http_status(error)
    if code in _MISCONFIGURED:
        return ObjectStoreMisconfigured(f"{says}; {_MISCONFIGURED[code]}")
    if code in _DENIED:
        return ObjectStoreDenied(f"{says}; {_SET_CREDENTIALS}")
    if code in _FULL or status == 507:
        return ObjectStoreFull(f"{says}; free space or raise the quota")
    if code in _REPEAT or status in (408, 429) or status >= 500:
        return ObjectStoreUnavailable(says)
    if status in (401, 403):
        return ObjectStoreDenied(f"{says}; {_SET_CREDENTIALS}")
    if status in (301, 307, 400):
        return ObjectStoreMisconfigured(f"{says}; see that bucket, region= and endpoint= belong together")
    return ObjectStoreError(says)


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
