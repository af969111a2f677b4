"""What the EndpointSlices of a service say together. Plain data in, endpoints out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from services.scheduler.cell.events import Endpoint
from shared.network.addresses import join_address

# A service in both families has slices of each, with the same pods: only the first family that it has is used, because
# a worker with two addresses would take two places.
_FAMILIES = ("IPv4", "IPv6")


def merge_slices(slices: Iterable[Mapping[str, Any]], port: str) -> tuple[Endpoint, ...]:
    """The endpoints of a service, by address.

    An address may be in several slices for a while: it is terminating if it is in all of them, and ready if it is in
    one. An endpoint without an address, as an evicted pod has, and a slice without the port do not count.

    Args:
        slices: As in the API's JSON. Source: Kubernetes API, EndpointSlice discovery.k8s.io/v1.
        port: Its name or number.
    """
    by_family: dict[str, dict[str, Endpoint]] = {}
    for one in slices:
        merged = by_family.setdefault(str(one.get("addressType")), {})
        for endpoint in _endpoints_of(one, port):
            known = merged.get(endpoint.address, endpoint)
            merged[endpoint.address] = Endpoint(
                endpoint.address,
                is_ready=known.is_ready or endpoint.is_ready,
                is_terminating=known.is_terminating and endpoint.is_terminating,
                zone=known.zone or endpoint.zone,
            )
    family = next((by_family[name] for name in _FAMILIES if by_family.get(name)), {})
    return tuple(family[address] for address in sorted(family))


def _endpoints_of(one: Mapping[str, Any], port: str) -> Iterator[Endpoint]:
    number = _port_number(one, port)
    for endpoint in one.get("endpoints") or ():
        addresses = [address for address in endpoint.get("addresses") or () if address]
        if number is None or not addresses:
            continue
        conditions = endpoint.get("conditions") or {}
        yield Endpoint(
            join_address(addresses[0], number),
            # An absent condition: ready is true, terminating is false.
            is_ready=conditions.get("ready") is not False,
            is_terminating=conditions.get("terminating") is True,
            zone=endpoint.get("zone") or None,
        )


def _port_number(one: Mapping[str, Any], port: str) -> int | None:
    if port.isdecimal():
        return int(port)
    return next((named["port"] for named in one.get("ports") or () if named.get("name") == port), None)
