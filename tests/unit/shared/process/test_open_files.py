"""The limit of open files, and what fits in it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shared.process.open_files import OWN_FILES
from tests.support.system.processes import ROOT, module_environment

pytestmark = pytest.mark.process

# In a process of its own: a hard limit cannot be raised again.
PROGRAM = """
import json, resource, sys
from shared.process.open_files import share_open_files
soft, hard, *promised = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(json.dumps([share_open_files(*promised), resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


@pytest.mark.parametrize(
    ("hard", "promised", "shares"),
    [
        (OWN_FILES + 600, (400, 200), [400, 200]),
        # In proportion, with some of its own left.
        (OWN_FILES + 300, (400, 200), [200, 100]),
        # Half of a very low limit.
        (OWN_FILES, (400, 200), [OWN_FILES // 3, OWN_FILES // 6]),
        # A port that is not open has no share, and one that is has at least one connection.
        (OWN_FILES + 300, (599, 0, 1), [299, 0, 1]),
    ],
)
def test_the_limit_is_raised_and_connections_fit_in_it(hard: int, promised: tuple[int, ...], shares: list[int]) -> None:
    arguments = map(str, (64, hard, *promised))
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        env=module_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == [shares, [hard, hard]]
    assert ("too low" in run.stderr) is (shares != list(promised))
