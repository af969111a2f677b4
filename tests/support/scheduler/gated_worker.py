"""A worker peer that a test can block."""

from __future__ import annotations

import asyncio

import grpc

from lockstep.internal.v1 import worker_pb2
from tests.support.scheduler.worker_peer import WorkerPeer


class GatedWorker(WorkerPeer):
    """Answers `Attach` and steps only while its gate is open; it is closed at first unless `is_open`."""

    def __init__(self, *, is_open: bool = False) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()

    async def Attach(
        self, request: worker_pb2.AttachRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AttachResponse:
        await self.gate.wait()
        return await super().Attach(request, context)

    async def answer(self, request: worker_pb2.StepRequest) -> worker_pb2.StepResult:
        result = await super().answer(request)
        await self.gate.wait()
        return result
