"""The `lockstep` command."""

import os

# gRPC reads this when it is loaded. `lockstep serve` starts processes while it checks the health of others: with gRPC's
# fork handlers, one in fourteen of them dies before its program starts. The handlers are not needed before an exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
