"""A client with tiny flow-control windows, so that a server notices at once that it does not read."""

from __future__ import annotations

import grpc

# The initial window of each call. It holds the first response: gRPC's server in Python cannot end a call whose first
# write, which also sends the metadata, was cancelled.
WINDOW_BYTES = 256


def open_narrow_channel(address: str) -> grpc.aio.Channel:
    """Open a separate connection to `address`; the caller closes it."""
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)
