"""The file of clients' keys: what it may have, when it is read again, and how calls name their key."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lockstep.v1 import common_pb2
from shared.errors import PermissionDeniedError, UnauthenticatedError, Violation
from shared.process.metrics import ClientKeysCollector
from shared.tenants import client_keys
from shared.tenants.client_keys import ANY_CLIENT, Client, ClientKeys, ClientKeysError, read_key_file
from shared.tenants.tenant import DEFAULT_TENANT, Tenant
from tests.support.clients.key_files import key_line, write_keys

KEY, OTHER = "sk-one", "sk-two"
HASH = sha256(KEY.encode()).hexdigest()


def keys_of(tmp_path: Path, *lines: str) -> ClientKeys:
    return ClientKeys(write_keys(tmp_path / "keys", *lines))


def identify(keys: ClientKeys, key: str) -> Client | None:
    """The holder of a key; None if it is not known."""
    try:
        return keys.identify([f"Bearer {key}"], [])
    except UnauthenticatedError:
        return None


def test_a_line_says_whose_its_key_is_and_what_it_may_do(tmp_path: Path) -> None:
    limits = {"weight": 2, "max_in_flight": 3, "max_waiting_requests": 5, "max_waiting_tokens": 4}
    lines = ("# who", "", key_line(KEY), key_line(OTHER, "b", **limits, max_priority="HIGH", is_operator=True), " \r")
    keys = keys_of(tmp_path, *lines)
    assert identify(keys, KEY) == Client(Tenant("a"), common_pb2.PRIORITY_NORMAL)
    tenant = Tenant("b", 2.0, max_in_flight=3, max_waiting_requests=5, max_waiting_tokens=4)
    assert identify(keys, OTHER) == Client(tenant, common_pb2.PRIORITY_HIGH, is_operator=True)
    assert (keys.num_keys, keys.is_stale) == (2, False)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"tenant": "a", "tenant": "b"}', "a field is there twice"),
        ('{"tenant": "a"}', "sha256: Field required"),
        (f'{{"sha256": "{HASH}"}}', "tenant: Field required"),
        (f'{{"sha256": "{HASH}0", "tenant": "a"}}', "sha256: must be 64 hexadecimal digits"),
        (f'{{"sha256": "{HASH[1:]}\\n", "tenant": "a"}}', "sha256: must be 64"),
        (f'{{"{HASH}": "a"}}', "sha256: Field required"),
        (f'{{"sha256": "{HASH}", "tenant": "a", "{HASH}": 1}}', "unknown field$"),
        (key_line(KEY, wieght=1), "unknown field wieght$"),
        (key_line(KEY, ""), "tenant: must be 1 to 64"),
        (key_line(KEY, "a\nb"), "tenant: must be 1 to 64"),
        (key_line(KEY, "a" * 65), "tenant: must be 1 to 64"),
        (key_line(KEY, weight=0), "weight: must be greater than or equal to 0.001"),
        (key_line(KEY, weight=float("nan")), "weight: must be"),
        (key_line(KEY, weight="1"), "weight: must be a valid number"),
        (key_line(KEY, weight=True), "weight: must be a valid number"),
        (key_line(KEY, max_in_flight=0), "max_in_flight: must be"),
        (key_line(KEY, max_in_flight=2**32), "max_in_flight: must be"),
        (key_line(KEY, max_in_flight=1.0), "max_in_flight: must be a valid integer"),
        (key_line(KEY, max_in_flight=None), "max_in_flight: must not be null"),
        (key_line(KEY, max_waiting_tokens=2**63), "max_waiting_tokens: must be"),
        (key_line(KEY, max_waiting_requests=2**32), "max_waiting_requests: must be"),
        (key_line(KEY, max_priority="high"), "max_priority: must be 'HIGH', 'NORMAL' or 'LOW'"),
        (key_line(KEY, is_operator=1), "is_operator: must be a valid boolean"),
        (key_line(OTHER, "b"), "sha256: an earlier line has the same"),
        (key_line(KEY, "b", weight=1), "weight: an earlier line of the same tenant has another"),
        (key_line(KEY, "b", weight=2, max_in_flight=1), "max_in_flight: an earlier line"),
        (key_line(KEY, "b", weight=2, max_waiting_tokens=1), "max_waiting_tokens: an earlier line"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number_and_field(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ClientKeysError, match=rf"--client-keys .*/keys, line 3: {message}") as error:
        keys_of(tmp_path, "# first", key_line(OTHER, "b", weight=2), line)
    assert HASH[1:] not in str(error.value)


@pytest.mark.parametrize(("data", "message"), [(b"", "it has no key"), (b"# \n", "no key"), (b"\xff", "not UTF-8")])
def test_a_file_without_keys_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(data)
    with pytest.raises(ClientKeysError, match=message):
        ClientKeys(path)
    with pytest.raises(ClientKeysError, match=r"--client-keys .*: No such file"):
        ClientKeys(tmp_path / "missing")


def test_a_changed_file_is_read_again_and_a_bad_one_leaves_the_last_good_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, path = keys_of(tmp_path, key_line(KEY)), tmp_path / "keys"
    registry = CollectorRegistry()
    registry.register(ClientKeysCollector(keys))

    def scrape() -> tuple[float | None, ...]:
        return tuple(map(registry.get_sample_value, ("lockstep_client_keys", "lockstep_client_keys_stale")))

    write_keys(path, key_line(OTHER), key_line("third"))
    assert (identify(keys, KEY), identify(keys, OTHER) is None, scrape()) == (None, False, (2, 0))
    with caplog.at_level(logging.WARNING):
        write_keys(path, key_line(KEY), "{")
        assert [identify(keys, OTHER) is None for _ in range(3)] == [False] * 3
        assert (identify(keys, KEY), scrape()) == (None, (2, 1))
        path.unlink()
        assert (identify(keys, OTHER) is None, scrape()) == (False, (2, 1))
        # Nobody writes to it: a read would last for ever.
        os.mkfifo(path)
        assert (identify(keys, OTHER) is None, scrape()) == (False, (2, 1))
        path.unlink()
    assert sum("not used" in record.message for record in caplog.records) == 3
    write_keys(path, key_line(KEY))
    assert (identify(keys, KEY) is None, identify(keys, OTHER), scrape()) == (False, None, (1, 0))


def test_a_symlink_that_is_swapped_as_kubernetes_does_is_followed(tmp_path: Path) -> None:
    for version, key in (("v1", KEY), ("v2", OTHER)):
        (tmp_path / version).mkdir()
        write_keys(tmp_path / version / "keys", key_line(key))
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = ClientKeys(tmp_path / "keys")
    assert identify(keys, KEY) is not None
    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    assert (identify(keys, KEY), identify(keys, OTHER) is None) == (None, False)


@pytest.mark.parametrize(
    ("authorizations", "api_keys"),
    [
        ([f"Bearer {KEY}"], []),
        ([f"bEARER   {KEY}"], []),
        ([], [KEY]),
        ([f"Bearer {KEY}", f"Bearer {KEY}"], [KEY, KEY]),
    ],
)
def test_a_call_names_its_key_in_either_place(tmp_path: Path, authorizations: list[str], api_keys: list[str]) -> None:
    assert keys_of(tmp_path, key_line(KEY)).identify(authorizations, api_keys).tenant.name == "a"


@pytest.mark.parametrize(
    ("authorizations", "api_keys", "message"),
    [
        ([], [], "a key is needed"),
        (["Bearer unknown"], [], "not known"),
        ([], [HASH], "not known"),
        ([f"Bearer {KEY}"], [OTHER], "two different keys"),
        ([f"Bearer {KEY}", "Bearer unknown"], [], "two different keys"),
        ([f"Basic {KEY}"], [], "not `Bearer KEY`"),
        ([KEY], [], "not `Bearer KEY`"),
        ([f"Bearer{KEY}"], [], "not `Bearer KEY`"),
        ([f"Bearer {KEY} {KEY}"], [], "not `Bearer KEY`"),
        (["Bearer "], [], "not `Bearer KEY`"),
        (["Basic x"], [KEY], "not `Bearer KEY`"),
        ([], [""], "x-api-key is not a key"),
        ([], ["a" * 513], "x-api-key is not a key"),
        ([], ["kéy"], "x-api-key is not a key"),
        ([], [f"{KEY}\n"], "x-api-key is not a key"),
    ],
)
def test_a_call_without_exactly_one_known_key_is_refused(
    tmp_path: Path, authorizations: list[str], api_keys: list[str], message: str
) -> None:
    keys = keys_of(tmp_path, key_line(KEY), key_line(OTHER))
    with pytest.raises(UnauthenticatedError, match=re.escape(message)) as error:
        keys.identify(authorizations, api_keys)
    assert KEY not in str(error.value)


def steps_of(identify_guess: Callable[[], object]) -> list[object]:
    """The lines of the module that run, and the functions that these call."""
    steps: list[object] = []

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        name = getattr(argument, "__qualname__", None) if event == "c_call" else None
        if frame.f_code.co_filename == client_keys.__file__:
            steps.append((event, frame.f_lineno, name))
        return trace

    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(trace)
    sys.settrace(trace)
    try:
        identify_guess()
    finally:
        sys.setprofile(before[0])
        sys.settrace(before[1])
    return steps


def test_a_guess_runs_the_same_steps_however_much_of_a_key_it_has(tmp_path: Path) -> None:
    key = "sk-0123456789abcdef"
    keys = keys_of(tmp_path, key_line(key), key_line(OTHER))
    # The same length, since a client knows that of its guess.
    guesses = [key[:length].ljust(len(key), "~") for length in range(len(key))]
    assert key not in guesses
    found = [steps_of(partial(identify, keys, guess)) for guess in guesses]
    assert len(found[0]) > 20
    assert all(steps == found[0] for steps in found)


HIGH, NORMAL, LOW = common_pb2.PRIORITY_HIGH, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_LOW


@pytest.mark.parametrize(
    ("limit", "requested", "priority"),
    [
        *((HIGH, each, each) for each in (HIGH, NORMAL, LOW)),
        *((limit, common_pb2.PRIORITY_UNSPECIFIED, max(limit, NORMAL)) for limit in (HIGH, NORMAL, LOW)),
        *((limit, 7, 7) for limit in (HIGH, LOW)),
        (NORMAL, HIGH, None),
        (LOW, HIGH, None),
        (LOW, NORMAL, None),
        (LOW, LOW, LOW),
    ],
)
def test_a_priority_above_the_keys_is_refused(
    limit: common_pb2.Priority, requested: common_pb2.Priority, priority: common_pb2.Priority | None
) -> None:
    client = Client(DEFAULT_TENANT, limit)
    if priority is not None:
        assert client.resolve_priority(requested) == priority
    else:
        with pytest.raises(PermissionDeniedError) as error:
            client.resolve_priority(requested)
        assert error.value.values == {"max_priority": common_pb2.Priority.Name(limit)}


@pytest.mark.parametrize(
    ("n", "num_prompts", "field"),
    [(4, 1, None), (5, 1, "sampling.n"), (2, 2, None), (2, 3, "prompts.prompts"), (5, 2, "sampling.n")],
)
def test_more_choices_than_may_be_in_flight_are_a_violation(n: int, num_prompts: int, field: str | None) -> None:
    violations: list[Violation] = []
    Client(Tenant("a", max_in_flight=4), NORMAL).check_num_choices(n, num_prompts, violations)
    assert [violation.field for violation in violations] == ([] if field is None else [field])
    ANY_CLIENT.check_num_choices(8, 64, violations)
    assert len(violations) == (field is not None)


def test_a_clients_key_is_its_files_only_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY.encode() + b"\r\n")
    assert read_key_file(path) == KEY
    for data in (b"", b"\n", b"a b", b"a\nb", b"\xff", b"a" * 513):
        path.write_bytes(data)
        with pytest.raises(ClientKeysError, match=f"{path}: must have one line"):
            read_key_file(path)
    with pytest.raises(ClientKeysError, match="No such file"):
        read_key_file(tmp_path / "missing")
