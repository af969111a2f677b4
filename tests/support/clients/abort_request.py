"""Aborts a request of a cell, as an operator does: `python -m tests.support.clients.abort_request ADDRESS ID`."""

from __future__ import annotations

import sys

import grpc

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc

if __name__ == "__main__":
    address, request_id = sys.argv[1:]
    with grpc.insecure_channel(address) as channel:
        scheduler_pb2_grpc.SchedulerServiceStub(channel).Abort(scheduler_pb2.AbortRequest(request_id=request_id))
