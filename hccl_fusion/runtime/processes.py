"""Processes of ranks: each leads a process group of its own, so that whatever it starts can be ended with it.

A rank that has ended is looked at without being reaped: as long as it is a zombie its group's number cannot pass to a
stranger, and signals to the group are safe.
"""

from __future__ import annotations

__all__ = ["LinePrefixer", "RankProcess", "exit_text"]

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hccl_fusion.runtime.group_registry import LifecycleError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class LinePrefixer:
    """Puts a prefix in front of every line of a stream of bytes that comes in arbitrary pieces.

    >>> lines = LinePrefixer(b"[0] ")
    >>> lines.feed(b"one\\ntw"), lines.feed(b"o\\n"), lines.feed(b"three"), lines.finish()
    (b'[0] one\\n', b'[0] two\\n', b'', b'[0] three\\n')
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Returns the lines that `data` completes; the beginning of a line waits for its end."""
        head, newline, tail = data.rpartition(b"\n")
        if not newline:
            self._parts.append(data)
            return b""
        lines = b"".join([*self._parts, head])
        self._parts = [tail] if tail else []
        return self._prefix + lines.replace(b"\n", b"\n" + self._prefix) + b"\n"

    def finish(self) -> bytes:
        """Returns a last line that has no end, with an end."""
        return self.feed(b"\n") if any(self._parts) else b""


class RankProcess:
    """One rank's process and its group.

    Attributes:
        rank: its rank.
        popen: the process; its `stdout` and `stderr` are pipes of bytes.
        code: its exit code, negative for a signal; None while it runs.
        kill_at: when its group is to be killed (`time.monotonic`); None where nobody has asked it to end.
    """

    def __init__(self, rank: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the process.

        Raises:
            LifecycleError: the system cannot start it.
        """
        self.rank = rank
        self.code: int | None = None
        self.kill_at: float | None = None
        self._is_gone = False
        parent = os.getpid()
        try:
            self.popen = subprocess.Popen(
                list(arguments),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=lambda: _end_with(parent),  # the launcher has no threads
            )
        except OSError as error:
            raise LifecycleError(
                f"rank {rank} cannot be started", where=arguments[0], found=error.strerror, expected="a process"
            ) from error

    def look(self) -> bool:
        """Whether the process has ended since the last look; sets `code`."""
        if self.code is not None:
            return False
        found = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return False
        self.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return True

    def send(self, number: int) -> None:
        """Sends a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, number)

    def is_gone(self) -> bool:
        """Whether nothing of the group runs any more."""
        if not self._is_gone and self.code is not None:
            self._is_gone = not _group_runs(self.popen.pid)
        return self._is_gone

    def reap(self) -> None:
        """Kills what is left of the group and closes the pipes."""
        self.send(signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()


def exit_text(code: int) -> str:
    """`ended with exit code 3`, `was killed by signal 9 (SIGKILL)`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {-code} ({name})"


def _end_with(parent: int) -> None:
    """Runs in the new process: the kernel kills it when the launcher dies, however that dies."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _group_runs(group: int) -> bool:
    """Whether a process of the group runs; zombies do not count. Where there is no /proc: False."""
    try:
        numbers = [name for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return False
    for number in numbers:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            with open(f"/proc/{number}/stat", "rb") as file:
                # The command's name in parentheses may hold anything.
                state, _, process_group = file.read().rpartition(b")")[2].split()[:3]
            if int(process_group) == group and state not in (b"Z", b"X"):
                return True
    return False
