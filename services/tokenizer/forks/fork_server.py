"""Forks a process for each connection, and ends it when the connection is closed.

It has one thread and no gRPC, whose handlers kill one forked process in twenty, and what a child needs is already
imported: a fork takes a millisecond. Nothing that a client or a template wrote is read here, only in the children.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
from collections.abc import Callable

from services.tokenizer.forks.frames import send_frame
from shared.process.parent import make_end_with_parent

_CONTROL_FD = 0
_STDERR_FD = 2


class ForkServer:
    """Forks a child for each socket that arrives.

    The child ends when the other end of its socket is closed, busy or not. When it ends in another way, the last
    message that the other end receives is `{"ended": CODE}`, the exit code or minus the signal's number.
    """

    def __init__(self, control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """`control` brings the sockets; a child serves its own by `serve`, and ends after it."""
        self._control = control
        self._serve = serve
        self._pid_to_connection: dict[int, socket.socket] = {}
        self._end_with_parent = make_end_with_parent(os.getpid())
        self._woken, wake = os.pipe()
        for fd in (self._woken, wake):
            os.set_blocking(fd, False)
        self._wake = wake
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def run(self) -> None:
        """Serve until `control` is closed at the other end."""
        is_open = True
        while is_open:
            ready = {fd for fd, _ in self._poll.poll()}
            # In this order: a new connection may get the number of one that is closed here.
            for fd in ready - {self._woken, self._control.fileno()}:
                self._kill(fd)
            if self._woken in ready:
                self._reap()
            if self._control.fileno() in ready:
                is_open = self._accept()

    def _accept(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not message:
            return False
        connection = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError:
            # There is no memory, or no process left; the other end sees the end of its connection.
            connection.close()
            return True
        if pid == 0:
            self._be_child(connection)
        self._pid_to_connection[pid] = connection
        # Only the other end's closing is reported: what arrives is the child's.
        self._poll.register(connection, 0)
        return True

    def _be_child(self, connection: socket.socket) -> None:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._end_with_parent()
            for other in (self._control, *self._pid_to_connection.values()):
                other.close()
            os.close(self._woken)
            os.close(self._wake)
            self._serve(connection)
        finally:
            os._exit(1)

    def _kill(self, fd: int) -> None:
        self._poll.unregister(fd)
        for pid, connection in self._pid_to_connection.items():
            if connection.fileno() == fd:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._tell_end(self._pid_to_connection.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))

    def _tell_end(self, connection: socket.socket, code: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(connection)
        connection.setblocking(False)
        with connection, contextlib.suppress(OSError):
            send_frame(connection, {"ended": code})


def run_fork_server(parent_pid: int, serve: Callable[[socket.socket], None]) -> int:
    """Run as the process that the socket at stdin controls, after its imports; returns its exit code.

    Args:
        parent_pid: The process that it ends with.
        serve: What a child does with its connection.
    """
    make_end_with_parent(parent_pid)()
    # What a crash prints may quote a client.
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR_FD)
    gc.collect()
    gc.freeze()
    ForkServer(socket.socket(fileno=_CONTROL_FD), serve).run()
    return 0
