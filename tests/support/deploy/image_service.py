"""A service that runs from an image that `tests.support.deploy.dockerfile` has built."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator

from tests.support.deploy.dockerfile import Build
from tests.support.system.patience import PATIENCE_S

_POLL_S = 0.05
_USER = 65532


@contextlib.contextmanager
def running_service(images: Build, name: str, address: str, *flags: str) -> Iterator[None]:
    """Run an image's entry point until it has started; it is killed at the end.

    Where the tests run as root, the service runs as the image's user, who owns nothing. Only the programs of the image
    are on its PATH.

    Args:
        images: Has built the image. Its files become read-only.
        name: The image's stage.
        address: Where the service is to answer probes.
        flags: The service's other ones.
    """
    subprocess.run(["chmod", "-R", "a-w,a+rX", *map(str, images.folder.glob("opt"))], check=True)
    environment = images.environment(name) | {"PATH": str(images.folder / "opt" / "venv" / "bin")}
    program, *arguments = images.command(name)
    command = [f"{environment['PATH']}/{program}", *arguments, *flags, f"--manage-listen={address}"]
    with subprocess.Popen([*_as_image_user(), *command], env=environment, cwd=images.folder / "opt") as process:
        try:
            _wait_until_started(process, address)
            yield
        finally:
            process.kill()


def _as_image_user() -> list[str]:
    """Kills the service when this process ends, and takes all rights from it that can be taken."""
    # By its path: it is not on the image's.
    setpriv = [shutil.which("setpriv") or "", "--pdeathsig=KILL", "--no-new-privs"]
    if os.geteuid() != 0:
        return setpriv
    return [*setpriv, f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--bounding-set=-all"]


def _wait_until_started(process: subprocess.Popen[bytes], address: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the service ended with code {process.returncode}"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/startupz"):
            return
        time.sleep(_POLL_S)
    raise AssertionError("the service does not start")
