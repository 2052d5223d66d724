"""S3 that is away, slow, throttling or misconfigured: calls end in time, in the truth or a named error."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import boto3
import pytest

from dray.errors import (
    ObjectDamaged,
    ObjectExists,
    ObjectNotFound,
    ObjectStoreDenied,
    ObjectStoreError,
    ObjectStoreFull,
    ObjectStoreMisconfigured,
    ObjectStoreUnavailable,
    ObjectTooShort,
)
from dray.objectstore.health import Health
from dray.objectstore.opening import open_object_store
from dray.objectstore.store import ObjectStore
from tests.conformance.objectstore.front import (
    Fault,
    Forward,
    Front,
    answer,
    flipped,
    lost,
    stalled,
    truncated,
)
from tests.servers.process import free_port
from tests.servers.proxy import Mode, TcpProxy
from tests.servers.s3 import S3Server

TIMEOUT_S = 1.0
# What a call may take beyond its own deadline before this counts as a hang, on a busy machine.
GRACE_S = 4.0
SEVERAL_PARTS = 16 * 2**20 + 1
COMPLETION = r"POST .*uploadId="  # of a put in parts


@asynccontextmanager
async def opened(url: str, timeout_s: float = 10.0) -> AsyncIterator[ObjectStore]:
    store = await open_object_store(url, timeout_s)
    yield store
    await store.close()


@pytest.fixture
def prefix() -> str:
    return f"test/{secrets.token_hex(6)}"


@pytest.fixture
async def direct(s3_server: S3Server, prefix: str) -> AsyncIterator[ObjectStore]:
    """Undisturbed; it tells the truth."""
    async with opened(s3_server.url(prefix)) as store:
        yield store


@pytest.fixture
async def store(s3_server: S3Server, front: Front, prefix: str) -> AsyncIterator[ObjectStore]:
    """Through the `front`, whose records begin with the test."""
    async with opened(s3_server.url(prefix, address=front.address)) as made:
        front.requests.clear()
        yield made


def health_of(store: ObjectStore) -> Health:
    return store.health  # by a call, since mypy takes a property for a constant


async def head(store: ObjectStore) -> object:
    return (await store.head("k")).size  # not its time: two puts of the same may fall into two seconds


async def list_keys(store: ObjectStore) -> object:
    return [(info.key, info.size) for info in await store.list()]


CALLS: dict[str, tuple[str, Callable[[ObjectStore], Awaitable[object]]]] = {
    "put": ("PUT", lambda s: s.put("new", b"content")),
    "put-if-absent": ("PUT", lambda s: s.put("new", b"content", if_absent=True)),
    "get": ("GET", lambda s: s.get("k")),
    "get_range": ("GET", lambda s: s.get_range("k", 1, 3)),
    "get_range clipped": ("GET", lambda s: s.get_range("k", 1, 300, clip=True)),
    "head": ("HEAD", head),
    "delete": ("DELETE", lambda s: s.delete("k")),
    "delete_many": ("POST", lambda s: s.delete_many(["k"])),
    "list": ("GET", list_keys),
}
PASSING = {
    "503 SlowDown": answer(503, "SlowDown"),
    "500 InternalError": answer(500, "InternalError"),
    "429": answer(429, "TooManyRequests"),
    "400 RequestTimeout": answer(400, "RequestTimeout"),
    "the answer is lost": lost,
}


@pytest.mark.parametrize("fault", PASSING)
async def test_what_passes_is_repeated(
    store: ObjectStore, direct: ObjectStore, front: Front, fault: str
) -> None:
    for method, call in CALLS.values():
        await direct.delete("new")
        await direct.put("k", b"0123456789")
        expected = await call(direct)
        await direct.delete("new")
        await direct.put("k", b"0123456789")
        front.requests.clear()
        front.spoil(method, PASSING[fault])
        if method == "HEAD" and fault == "400 RequestTimeout":
            front.heal()  # a HEAD has no body that could say so
        assert await call(store) == expected
    assert store.health is Health.HEALTHY


async def test_what_does_not_pass_ends_in_time(s3_server: S3Server, front: Front, prefix: str) -> None:
    async with opened(s3_server.url(prefix, address=front.address), 2 * TIMEOUT_S) as store:
        front.requests.clear()
        methods = {method for method, _ in CALLS.values()}
        for method in methods:
            front.spoil(method, answer(503, "SlowDown"), times=1000)

        async def outcome(call: Callable[[ObjectStore], Awaitable[object]]) -> object:
            try:
                return await call(store)
            except ObjectStoreError as error:
                return error

        async with asyncio.timeout(2 * TIMEOUT_S + GRACE_S):
            outcomes = await asyncio.gather(*(outcome(call) for _, call in CALLS.values()))
        for ended in outcomes:
            error = ended["k"] if isinstance(ended, dict) else ended
            assert isinstance(error, ObjectStoreUnavailable)
            assert "SlowDown" in str(error) or "503" in str(error)
        # Pauses of full jitter below 50 ms, 100 ms, 200 ms …: some tries in two seconds, but no flood.
        for method in methods:
            calls = sum(method == each for each, _ in CALLS.values())
            assert 2 * calls <= front.count(f"^{method}") <= 30 * calls
        assert health_of(store) is Health.UNAVAILABLE
        front.heal()
        await store.check()
        assert health_of(store) is Health.DEGRADED
        await store.check()
        await store.check()
        assert health_of(store) is Health.HEALTHY


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (answer(403, "AccessDenied"), ObjectStoreDenied, "AWS_ACCESS_KEY_ID"),
        (answer(400, "ExpiredToken"), ObjectStoreDenied, "AWS_SESSION_TOKEN"),
        (answer(403, "RequestTimeTooSkewed"), ObjectStoreMisconfigured, "clocks"),
        (answer(404, "NoSuchBucket"), ObjectStoreMisconfigured, "create the bucket"),
        (answer(400, "AuthorizationHeaderMalformed"), ObjectStoreMisconfigured, "region="),
        (answer(501, "NotImplemented"), ObjectStoreMisconfigured, "endpoint="),
        (answer(403, "QuotaExceeded"), ObjectStoreFull, "free space"),
        (answer(507, "InsufficientStorage"), ObjectStoreFull, "free space"),
    ],
    ids=["denied", "expired", "clock skew", "no bucket", "region", "not S3", "quota", "full"],
)
async def test_what_cannot_pass_fails_at_once(
    store: ObjectStore, front: Front, fault: Fault, error: type[ObjectStoreError], says: str
) -> None:
    front.spoil("PUT", fault, times=1000)
    front.spoil("GET", fault, times=1000)
    for call in (store.put("k", b"x"), store.put("k", b"x" * SEVERAL_PARTS), store.get("k"), store.list()):
        front.requests.clear()
        with pytest.raises(error, match=f"^objects s3://.*{says}"):
            await call
        assert front.count("^GET|^PUT .*/k$") <= 4  # the parts of one put, none of them twice


@pytest.mark.parametrize("fault", [truncated, flipped], ids=["truncated", "flipped bit"])
async def test_a_damaged_body_is_read_again_then_named(
    store: ObjectStore, direct: ObjectStore, front: Front, fault: Fault
) -> None:
    await direct.put("k", b"0123456789" * 1000)
    front.spoil("GET", fault, times=2)
    assert await store.get("k") == b"0123456789" * 1000
    front.requests.clear()
    front.spoil("GET", fault, times=1000)
    with pytest.raises(ObjectDamaged):
        await store.get("k")
    assert front.count("^GET") == 3


async def test_the_checksum_of_an_object_in_parts_is_verified(
    store: ObjectStore, direct: ObjectStore, front: Front
) -> None:
    await direct.put("k", b"x" * SEVERAL_PARTS)
    front.spoil("GET", flipped, times=1000)
    with pytest.raises(ObjectDamaged):
        await store.get("k")


@pytest.mark.parametrize("clip", [False, True], ids=["exact", "clip"])
@pytest.mark.parametrize(("start", "end"), [(2, 5), (2, 10), (0, 10)])
async def test_a_truncated_range_is_noticed(
    store: ObjectStore, direct: ObjectStore, front: Front, start: int, end: int, clip: bool
) -> None:
    await direct.put("k", b"0123456789")
    asked = 1000 if clip and end == 10 else end
    front.spoil("GET", truncated, times=2)
    assert await store.get_range("k", start, asked, clip=clip) == b"0123456789"[start:end]
    front.spoil("GET", truncated, times=1000)
    with pytest.raises(ObjectDamaged):
        await store.get_range("k", start, asked, clip=clip)


@pytest.mark.parametrize(
    "told",
    [
        "Content-Length: 8\r\nContent-Range: bytes 2-8/10",  # one byte more than the range
        "Content-Length: 7\r\nContent-Range: bytes 2-8/10",  # sound, but the object goes on
        "Content-Length: 7\r\nContent-Range: bytes 3-9/10",
        "Content-Length: 8\r\nContent-Range: bytes 2-9/*",
        "Content-Length: 8",
    ],
)
async def test_a_clipped_range_that_is_not_what_was_asked_for_is_noticed(
    store: ObjectStore, front: Front, told: str
) -> None:
    """What comes may be shorter than what was asked for only because the object ends."""

    async def another_range(_: Forward) -> bytes:
        return f"HTTP/1.1 206 Partial\r\nConnection: close\r\n{told}\r\n\r\n23456789".encode()

    front.spoil("GET", another_range, times=1000)
    with pytest.raises(ObjectDamaged):
        await store.get_range("k", 2, 1000, clip=True)
    assert front.count("^GET") == 3


async def test_a_server_without_ranges_clips_only_what_begins_with_the_object(
    store: ObjectStore, front: Front
) -> None:
    async def whole(_: Forward) -> bytes:
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 10\r\n\r\n0123456789"

    async def empty(_: Forward) -> bytes:
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

    front.spoil("GET", whole)
    assert await store.get_range("k", 0, 1000, clip=True) == b"0123456789"
    front.spoil("GET", empty)
    with pytest.raises(ObjectTooShort):
        await store.get_range("k", 0, 1000, clip=True)


async def test_a_spoilt_upload_is_refused_and_sent_again(store: ObjectStore, front: Front) -> None:
    """The server compares the checksum before the object appears."""

    async def corrupt(forward: Forward) -> bytes:
        return await forward(lambda body: b"X" + body[1:])

    front.spoil("PUT", corrupt)
    await store.put("k", b"0123456789")
    assert front.count("^PUT") == 2
    assert await store.get("k") == b"0123456789"


@pytest.mark.parametrize("size", [1000, SEVERAL_PARTS], ids=["whole", "several parts"])
async def test_put_if_absent_recognises_its_own_lost_success(
    store: ObjectStore, direct: ObjectStore, front: Front, size: int
) -> None:
    front.spoil("PUT" if size == 1000 else COMPLETION, lost, times=2)
    await store.put("k", b"x" * size, if_absent=True)
    assert await direct.get("k") == b"x" * size


async def test_put_if_absent_does_not_take_the_same_bytes_of_another_for_its_own(
    store: ObjectStore, direct: ObjectStore, front: Front
) -> None:
    async def another_first(_: Forward) -> bytes:
        await direct.put("k", b"same", if_absent=True)
        return b""

    front.spoil("PUT", another_first)
    with pytest.raises(ObjectExists):
        await store.put("k", b"same", if_absent=True)


async def test_a_lost_completion_of_parts_is_recognised(
    store: ObjectStore, direct: ObjectStore, front: Front
) -> None:
    """versitygw answers a second completion like the first; other servers have forgotten the upload."""
    front.spoil(COMPLETION, lost)
    front.spoil(COMPLETION, answer(404, "NoSuchUpload"), times=1000)
    await store.put("k", b"x" * SEVERAL_PARTS)
    assert await direct.get("k") == b"x" * SEVERAL_PARTS


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_put_in_parts_that_ends_early_leaves_no_parts(
    s3_server: S3Server, front: Front, direct: ObjectStore, prefix: str, how: str
) -> None:
    async with opened(s3_server.url(prefix, address=front.address), 3.0) as store:
        front.requests.clear()
        # The first part stands still until its attempt times out; nothing is completed.
        front.spoil("PUT", stalled if how == "cancelled" else answer(403, "AccessDenied"))
        put = asyncio.create_task(store.put("k", b"x" * SEVERAL_PARTS))
        await front.wait_for("^PUT", times=3)
        if how == "cancelled":
            put.cancel()
        [ended], _ = await asyncio.wait([put])
        assert ended.cancelled() if how == "cancelled" else isinstance(ended.exception(), ObjectStoreDenied)
        front.heal()
        await front.wait_for("^DELETE")
    assert uploads(s3_server, prefix) == []
    with pytest.raises(ObjectNotFound):
        await direct.get("k")


def uploads(server: S3Server, prefix: str) -> list[str]:
    client = boto3.client("s3", endpoint_url=server.endpoint, region_name=server.region)
    found = client.list_multipart_uploads(Bucket=server.bucket, Prefix=prefix).get("Uploads", [])
    client.close()
    return [upload["Key"] for upload in found]


async def test_keys_that_a_batched_delete_could_not_remove_are_named(
    store: ObjectStore, front: Front
) -> None:
    await store.put("a", b"x")
    await store.put("b", b"x")

    async def refuse_one(forward: Forward) -> bytes:
        await forward()
        key = next(each for each in store_keys if each.endswith("/b"))
        body = (
            f"<DeleteResult><Error><Key>{key}</Key><Code>AccessDenied</Code>"
            "<Message>no</Message></Error></DeleteResult>"
        ).encode()
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    store_keys = [request.partition("/dray-test/")[2] for request in front.requests]
    front.spoil("POST", refuse_one)
    failed = await store.delete_many(["a", "b"])
    assert list(failed) == ["b"]
    assert isinstance(failed["b"], ObjectStoreDenied)


async def test_absent_keys_count_as_deleted_where_the_server_calls_them_missing(
    store: ObjectStore, front: Front, prefix: str
) -> None:
    """S3 answers 204; Google's, among others, 404 with this code. A missing bucket is still an error."""
    front.spoil("DELETE", answer(404, "NoSuchKey"))
    await store.delete("k")
    front.spoil("DELETE", answer(404, "NoSuchBucket"))
    with pytest.raises(ObjectStoreMisconfigured):
        await store.delete("k")

    async def missing_and_denied(_: Forward) -> bytes:
        errors = "".join(
            f"<Error><Key>{prefix}/{key}</Key><Code>{code}</Code><Message>no</Message></Error>"
            for key, code in (("a", "NoSuchKey"), ("b", "AccessDenied"))
        )
        body = f"<DeleteResult>{errors}</DeleteResult>".encode()
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    front.spoil("POST", missing_and_denied)
    assert list(await store.delete_many(["a", "b"])) == ["b"]


async def test_near_ranges_are_one_request_and_far_ones_several(store: ObjectStore, front: Front) -> None:
    await store.put("k", bytes(3 * 2**20))
    front.requests.clear()
    await store.get_ranges("k", [(0, 10), (10, 20), (100_000, 100_001), (250_000, 250_010)])
    assert front.count("^GET") == 1
    await store.get_ranges("k", [(0, 10), (2 * 2**20, 2 * 2**20 + 1)])
    assert front.count("^GET") == 3


async def test_reads_that_hang_do_not_hold_up_writes(s3_server: S3Server, front: Front, prefix: str) -> None:
    """Consumers catching up must not starve producers."""
    async with opened(s3_server.url(prefix, address=front.address), 3.0) as store:
        front.spoil("GET", stalled, times=1000)
        reads = [asyncio.create_task(store.get("k")) for _ in range(40)]
        await front.wait_for("^GET .*/k", times=10)
        await store.put("k", b"x")
        assert not any(read.done() for read in reads)
        for read in reads:
            read.cancel()
        await asyncio.wait(reads)


async def cut(proxy: TcpProxy) -> None:
    proxy.cut()


async def cut_inside_a_request(proxy: TcpProxy) -> None:
    proxy.cut_after(1)


async def black_hole(proxy: TcpProxy) -> None:
    await proxy.set_mode(Mode.BLACK_HOLE)


async def drop_answers(proxy: TcpProxy) -> None:
    await proxy.set_mode(Mode.DROP_ANSWERS)


async def refuse(proxy: TcpProxy) -> None:
    await proxy.set_mode(Mode.REFUSE)
    proxy.cut()


async def delay(proxy: TcpProxy) -> None:
    proxy.delay_s = 0.02


@pytest.mark.parametrize(
    "fault",
    [cut, cut_inside_a_request, black_hole, drop_answers, refuse, delay],
    ids=lambda each: each.__name__,
)
async def test_no_call_hangs_on_a_broken_network(
    s3_server: S3Server,
    proxy: TcpProxy,
    direct: ObjectStore,
    prefix: str,
    fault: Callable[[TcpProxy], Awaitable[None]],
) -> None:
    passes = fault in (cut, cut_inside_a_request, delay)
    await direct.put("k", b"0123456789")

    async def one(store: ObjectStore, call: Callable[[ObjectStore], Awaitable[object]]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S + GRACE_S):
                await call(store)
        except ObjectStoreUnavailable:
            assert not passes

    calls = [call for name, (_, call) in CALLS.items() if name not in ("delete", "delete_many", "put")]
    async with opened(s3_server.url(prefix, address=proxy.address), 3.0 if passes else TIMEOUT_S) as store:
        await asyncio.gather(
            *(one(store, call) for call in calls[1:])
        )  # connections are open when it strikes
        await fault(proxy)
        await asyncio.gather(*(one(store, call) for call in calls))
        proxy.delay_s = 0.0
        await proxy.set_mode(Mode.PASS)
        proxy.cut()
        await store.put("after", b"works")
        assert await direct.get("after") == b"works"


@pytest.fixture
def own_server(s3_server: S3Server, tmp_path: Path) -> Iterator[S3Server]:
    """One that may be killed, with the credentials of the shared one."""
    server = S3Server(tmp_path)
    server.start()
    yield server
    server.kill()


async def test_a_killed_server_is_waited_for(own_server: S3Server) -> None:
    async with opened(own_server.url("p"), 20.0) as store:
        acknowledged: list[int] = []
        one_more = asyncio.Event()
        going_on = True

        async def write(first: int) -> None:
            number = first
            while going_on:
                await store.put(f"{number}", f"{number}".encode() * 1000, if_absent=True)
                acknowledged.append(number)
                one_more.set()
                number += 4

        async def acknowledge(count: int) -> None:
            for _ in range(count):
                one_more.clear()
                await one_more.wait()

        async with asyncio.TaskGroup() as writers:
            for first in range(4):
                writers.create_task(write(first))
            for _ in range(2):
                await acknowledge(20)
                own_server.kill()
                await asyncio.to_thread(own_server.start)
            await acknowledge(20)
            going_on = False
        for number in acknowledged:
            assert await store.get(f"{number}") == f"{number}".encode() * 1000
        assert {info.key for info in await store.list()} == {f"{number}" for number in acknowledged}


async def test_wrong_credentials_are_named_at_opening(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(ObjectStoreDenied, match=r"^objects s3://.*AWS_SECRET_ACCESS_KEY"):
        await open_object_store(s3_server.url("p"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(ObjectStoreDenied, match=r"^objects s3://.*AWS_ACCESS_KEY_ID"):
        await open_object_store(s3_server.url("p"))
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ObjectStoreDenied, match=r"^objects s3://.*AWS_ACCESS_KEY_ID"):
        await open_object_store(s3_server.url("p"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(ObjectStoreDenied, match=r"^objects s3://.*AWS_ACCESS_KEY_ID"):
        await open_object_store(s3_server.url("p"))


async def test_a_missing_bucket_is_named_at_opening(s3_server: S3Server) -> None:
    with pytest.raises(ObjectStoreMisconfigured, match=r"^objects s3://no-such-bucket.*create the bucket"):
        await open_object_store(s3_server.url("p", bucket="no-such-bucket"))


async def test_a_bucket_that_vanishes_is_not_an_absent_object(s3_server: S3Server, front: Front) -> None:
    """The answer to a HEAD has no body: it says only 404."""
    async with opened(s3_server.url("p", address=front.address)) as store:
        front.spoil("HEAD", answer(404, "NoSuchBucket"))
        front.spoil("GET", answer(404, "NoSuchBucket"))
        with pytest.raises(ObjectStoreMisconfigured, match="create the bucket"):
            await store.head("k")


async def test_a_server_that_is_not_there_is_unavailable_in_time(s3_server: S3Server) -> None:
    address = f"127.0.0.1:{free_port()}"
    began_s = time.monotonic()
    with pytest.raises(ObjectStoreUnavailable, match=address):
        await open_object_store(s3_server.url("p", address=address), TIMEOUT_S)
    assert time.monotonic() - began_s < TIMEOUT_S + GRACE_S


async def test_a_server_that_is_not_s3_is_misconfigured(s3_server: S3Server, front: Front) -> None:
    async def web_page(_: Forward) -> bytes:
        return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 13\r\n\r\n<html></html>"

    front.spoil("GET", web_page, times=1000)
    with pytest.raises(ObjectStoreMisconfigured, match="endpoint="):
        await open_object_store(s3_server.url("p", address=front.address))
