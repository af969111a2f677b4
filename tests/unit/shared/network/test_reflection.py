"""What reflection reports about a server, in both versions of its service."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from shared.network.health import Health
from shared.network.rpc import make_channel, make_server

VERSIONS = ("v1", "v1alpha")
HEALTH = "grpc.health.v1.Health"


async def ask(
    channel: grpc.aio.Channel, version: str, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    """Send one question to a version of the reflection service; the messages are the same in both."""
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([request]))
    response: reflection_pb2.ServerReflectionResponse = await call.read()
    return response


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_service_is_listed_and_described(tmp_path: Path, version: str) -> None:
    address = f"unix:{tmp_path}/server"
    server = make_server(address, [Health(())], service_names=["lockstep.v1.TokenizerService"])
    await server.start()
    async with make_channel(address) as channel:
        listed = await ask(channel, version, reflection_pb2.ServerReflectionRequest(list_services=""))
        names = [service.name for service in listed.list_services_response.service]
        assert sorted(names) == [
            HEALTH,
            *(f"grpc.reflection.{name}.ServerReflection" for name in VERSIONS),
            "lockstep.v1.TokenizerService",
        ]
        for name in names[:3]:
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
            response = await ask(channel, version, request)
            [file] = response.file_descriptor_response.file_descriptor_proto
            described = descriptor_pb2.FileDescriptorProto.FromString(file)
            assert name in [f"{described.package}.{service.name}" for service in described.service]
    await server.stop(0)
