"""What the slices of a service say together."""

from __future__ import annotations

from services.scheduler.cell.events import Endpoint
from services.scheduler.discovery.endpoint_slices import merge_slices
from tests.support.kubernetes.endpoint_slices import endpoint, make_slice


def test_a_service_of_more_than_a_hundred_endpoints_has_several_slices() -> None:
    slices = [
        make_slice(f"workers-{part}", [endpoint(f"10.0.{part}.{number}") for number in range(100)]) for part in range(3)
    ]
    assert len(merge_slices(slices, "grpc")) == 300


def test_absent_conditions_mean_ready_and_not_terminating() -> None:
    one = make_slice("a", [{"addresses": ["10.0.0.1"]}, endpoint("10.0.0.2", ready=False, terminating=True)])
    assert merge_slices([one], "grpc") == (
        Endpoint("10.0.0.1:50053"),
        Endpoint("10.0.0.2:50053", is_ready=False, is_terminating=True),
    )


def test_an_address_in_two_slices_is_one_endpoint_and_terminates_only_in_both() -> None:
    old = make_slice("old", [endpoint("10.0.0.1", ready=False, terminating=True)])
    new = make_slice("new", [endpoint("10.0.0.1", ready=True)])
    assert merge_slices([old, new], "grpc") == merge_slices([new, old], "grpc") == (Endpoint("10.0.0.1:50053"),)
    [terminating] = merge_slices([old, old], "grpc")
    assert terminating.is_terminating


def test_an_endpoint_has_its_zone_if_any_slice_says_it() -> None:
    with_zone = make_slice("a", [{"addresses": ["10.0.0.1"], "zone": "eu-1a"}, {"addresses": ["10.0.0.2"], "zone": ""}])
    without = make_slice("b", [endpoint("10.0.0.1")])
    for slices in ([with_zone, without], [without, with_zone]):
        assert [one.zone for one in merge_slices(slices, "grpc")] == ["eu-1a", None]


def test_the_endpoint_of_an_evicted_pod_has_no_address_and_does_not_count() -> None:
    one = make_slice("a", [endpoint(None, ready=False), endpoint(""), endpoint("10.0.0.1"), {"addresses": None}])
    assert [found.address for found in merge_slices([one], "grpc")] == ["10.0.0.1:50053"]


def test_slices_without_endpoints_or_ports_say_nothing() -> None:
    slices = [make_slice("a", None), make_slice("b", []), make_slice("c", [endpoint("10.0.0.1")], ports=None)]
    assert merge_slices(slices, "grpc") == ()


def test_a_port_is_found_by_its_name_in_each_slice_or_is_a_number() -> None:
    slices = [make_slice("a", [endpoint("10.0.0.1")], port=7), make_slice("b", [endpoint("10.0.0.2")], port=8)]
    assert [one.address for one in merge_slices(slices, "grpc")] == ["10.0.0.1:7", "10.0.0.2:8"]
    assert [one.address for one in merge_slices(slices, "9")] == ["10.0.0.1:9", "10.0.0.2:9"]
    assert merge_slices(slices, "http") == ()


def test_a_pod_with_addresses_of_both_families_is_one_endpoint() -> None:
    both = [make_slice("six", [endpoint("fd00::1")], addressType="IPv6"), make_slice("four", [endpoint("10.0.0.1")])]
    assert [one.address for one in merge_slices(both, "grpc")] == ["10.0.0.1:50053"]
    assert [one.address for one in merge_slices(both[:1], "grpc")] == ["[fd00::1]:50053"]
    names = [make_slice("names", [endpoint("worker.example.org")], addressType="FQDN")]
    assert merge_slices(names, "grpc") == ()
