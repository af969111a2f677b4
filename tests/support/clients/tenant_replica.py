"""A replica of a cell's scheduler whose requests are of several tenants."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from lockstep.internal.v1 import exchange_pb2, exchange_pb2_grpc
from shared.network.rpc import make_channel
from shared.request.limits import TOKEN_DTYPE
from shared.tenants.tenant import Tenant
from tests.support.scheduler.scheduler_shell import ReplicaStream

# The scheduler refuses it at once, so the refusal's place among the steps tells when its message was taken in.
_MARKER = Tenant("marker", max_in_flight=1)


@dataclass(slots=True)
class Outputs:
    """What one message says."""

    num_tokens: Counter[str] = field(default_factory=Counter)
    """By the tenant's name; empty unless the message has a step's tokens."""
    ended: list[str] = field(default_factory=list)
    """The tenants' names of the requests that ended."""


class TenantReplica:
    """Submits tenants' requests over one Exchange stream, and reads the scheduler's outputs in the order of its steps.

    So what it counts does not depend on how late it reads. (A client of the tokenizer that reads its streams late sees
    the tokens of many steps at once, and has nothing waiting meanwhile.)
    """

    def __init__(self, stream: ReplicaStream) -> None:
        self._stream = stream
        self._handles = itertools.count(1, 8)
        self._names: dict[int, str] = {}

    async def submit(self, *tenants: Tenant, num_requests: int, max_tokens: int) -> None:
        """Submit so many requests of three prompt tokens for each tenant, in one message; each gets all its tokens."""
        submits = [self._make(tenant, max_tokens) for tenant in tenants for _ in range(num_requests)]
        await self._submit(*submits)

    async def read(self) -> Outputs:
        """Read the next message."""
        outputs = (await self._stream.read()).outputs
        handles = np.frombuffer(outputs.handles, "<u4").tolist()
        counts = np.frombuffer(outputs.counts, "<i4").tolist()
        read = Outputs(ended=[self._names[end.handle] for end in outputs.ends])
        is_failed = any(end.HasField("error") and self._names[end.handle] != _MARKER.name for end in outputs.ends)
        assert not is_failed, outputs.ends
        for handle, count in zip(handles, counts, strict=True):
            read.num_tokens[self._names[handle]] += count
        return read

    async def count_steps(self, tenant: Tenant, beside: Tenant) -> int | None:
        """The steps from when the scheduler takes in a request of one token to that with its token, which is included.

        Steps are seen by the tokens of `beside`; None if it has none left.
        """
        await self._submit(self._make(_MARKER, 1, num_choices=2), self._make(tenant, 1))
        while _MARKER.name not in (await self.read()).ended:
            pass
        num_steps = 0
        while (num_tokens := (await self.read()).num_tokens)[beside.name]:
            num_steps += 1
            if num_tokens[tenant.name]:
                return num_steps
        return None

    def _make(self, tenant: Tenant, max_tokens: int, *, num_choices: int = 1) -> exchange_pb2.Submit:
        handle = next(self._handles)
        self._names.update(dict.fromkeys(range(handle, handle + num_choices), tenant.name))
        return exchange_pb2.Submit(
            handle=handle,
            request_id=f"request-{handle}",
            prompt_token_ids=np.array([1 + handle % 50, 2, 3], TOKEN_DTYPE).tobytes(),
            max_tokens=max_tokens,
            top_p=1.0,
            seed=handle,
            ignore_eos=True,
            attempt=1,
            n=num_choices,
            tenant=exchange_pb2.Tenant(name=tenant.name, weight=tenant.weight, max_in_flight=tenant.max_in_flight),
        )

    async def _submit(self, *submits: exchange_pb2.Submit) -> None:
        await self._stream.write(exchange_pb2.ExchangeRequest(submits=submits))


@asynccontextmanager
async def open_tenant_replica(cell_address: str) -> AsyncIterator[TenantReplica]:
    """A replica of the scheduler whose cell listens there; what it has in flight ends with it."""
    async with make_channel(cell_address, internal=True) as channel:
        stream = ReplicaStream(exchange_pb2_grpc.ExchangeServiceStub(channel).Exchange())
        while not (await stream.read()).HasField("cell_info"):
            pass
        yield TenantReplica(stream)
        stream.cancel()
