"""gRPC reflection, under both names that tools ask for: v1 and v1alpha."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2

_ALPHA_PACKAGE = "grpc.reflection.v1alpha"
_PACKAGE = "grpc.reflection.v1"
_SERVICE = f"{_PACKAGE}.ServerReflection"


def serve_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve reflection for these services and the health service."""
    names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME, _SERVICE]
    reflection.enable_server_reflection(names, server)
    # The library implements only v1alpha; v1 differs only in the package's name.
    _add_v1_to_pool()
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))


def _add_v1_to_pool() -> None:
    """Tools ask for the descriptor of every listed service."""
    alpha = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace(_ALPHA_PACKAGE, _PACKAGE)
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    file.name = "grpc/reflection/v1/reflection.proto"
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
