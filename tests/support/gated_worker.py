"""A worker peer that a test can hold up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from lockstep.internal.v1 import worker_pb2
from tests.support.worker_peer import WorkerPeer


class GatedWorker(WorkerPeer):
    """Is attached and answers steps only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AttachResponse:
        await self.gate.wait()
        return await super().Attach(request, context)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StepResult]:
        async for result in super().Execute(request_iterator, context):
            await self.gate.wait()
            yield result
