from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.system.patience import PATIENCE_S
from tests.support.system.processes import ROOT

pytestmark = pytest.mark.process

# The signal goes to another thread once the main one was seen asleep, waiting for a job, a hundred times in a row.
PROGRAM = """
import os, pathlib, signal, threading
from services.worker.process.device_loop import DeviceLoop
from services.worker.process.signals import call_at_stop_signals

def is_asleep():
    return pathlib.Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[0] == "S"

def send_signal():
    looks = 0
    while looks < 100:
        looks = looks + 1 if is_asleep() else 0
    signal.pthread_kill(threading.get_ident(), signal.SIGNAL)

device = DeviceLoop()
call_at_stop_signals(device.stop, device.stop)
threading.Thread(target=send_signal, daemon=True).start()
device.run()
print("stopped")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_delivered_to_another_thread_stops_a_sleeping_main_thread(name: str) -> None:
    program = PROGRAM.replace("SIGNAL", name)
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (result.returncode, result.stdout) == (0, "stopped\n"), result.stderr
