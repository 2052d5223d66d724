"""What the gRPC stores share: channels, and telling "never sent" from "may have happened".

gRPC may resend a call by itself; an append that is sent twice takes two positions. So retries are off
in every channel, and whatever is sent again is sent again by code that knows it is safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio

from dray.errors import Unavailable

# An answer holds at most what one bounded read asked for; this only stops a broken server.
MAX_RECEIVE_BYTES = 256 * 2**20

CHANNEL_OPTIONS: Sequence[tuple[str, int | str]] = (
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", -1),  # bounded by `limits` before a request is built
    # Notice a peer that vanished without a word. Servers refuse pings oftener than every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Come back quickly after a restart: the default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also the time a connection attempt is given
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Channels of two stores in one process must not share a connection (and its fate).
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, **changed: int | str
) -> grpc.aio.Channel:
    """A channel with `CHANNEL_OPTIONS`, except for those `changed`, named without their "grpc."."""
    options = list((dict(CHANNEL_OPTIONS) | {f"grpc.{name}": to for name, to in changed.items()}).items())
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


async def wait_ready(channel: grpc.aio.Channel, address: str, deadline: float) -> None:
    """Return once the channel is connected; `Unavailable` if closed, or at `deadline` of the loop's clock."""
    if channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
        return
    try:
        async with asyncio.timeout_at(deadline):
            await channel.channel_ready()
    except TimeoutError:
        raise Unavailable(f"no connection to {address}; is the server running and reachable?") from None
    except grpc.aio.UsageError:  # gRPC's word for a channel that was closed meanwhile
        raise Unavailable(f"the connection to {address} was closed") from None


def was_never_sent(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call failed for want of a connection, so that the server cannot have seen it."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and (error.details() or "").startswith(
        "failed to connect to all addresses"
    )
