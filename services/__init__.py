"""The three services of Lockstep. None of them imports another one."""

import os

# gRPC reads this when it is loaded. By default its core writes a line to stderr for every handshake that fails and
# every connection that ends: a port scanner could fill a log. Errors, such as a lack of descriptors, still appear.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
