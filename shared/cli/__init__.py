"""The `lockstep` command."""

import os

# Read when gRPC is loaded. `lockstep serve` starts processes while it asks others for their health: with gRPC's
# handlers of forks one in fourteen of them dies before its program begins. None needs them, each begins a new program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
