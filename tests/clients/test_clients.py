"""The HTTP API with clients that others have written, unchanged: one test for each check in their folders."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.clients.real_clients import Check, ClientProcess, find_checks

# Their names begin so; the others are left to `make test-clients`.
IN_TEST_SLOW = "openai_python-type-"


def mark(check: Check) -> object:
    marks = [pytest.mark.clients, *([pytest.mark.slow] if str(check).startswith(IN_TEST_SLOW) else [])]
    return pytest.param(check, id=str(check), marks=marks)


@pytest.mark.parametrize("check", [mark(check) for check in find_checks()])
def test_a_client_finds_what_it_expects(
    check: Check, run_client: Callable[[str], ClientProcess], request: pytest.FixtureRequest
) -> None:
    arguments = [request.getfixturevalue(name) for name in check.fixtures]
    run_client(check.client).run(check, arguments)
