"""A client whose windows hold almost nothing, so that a server notices at once that it does not read."""

from __future__ import annotations

import grpc

# The window of each call, before anything has been read.
WINDOW_BYTES = 100


def open_narrow_channel(address: str) -> grpc.aio.Channel:
    """A channel of its own to `address`; the caller closes it."""
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)
