"""Starts the ranks of a training script on this host, shows their output, and ends them together.

Every rank gets `HCCL_FUSION_RANK` and `HCCL_FUSION_ADDRESSES` (module `world`). One loop in one thread reads the pipes,
looks at the processes and obeys signals:

* a rank fails -> all others are asked to end (SIGTERM), and killed after the grace period;
* SIGINT, SIGTERM, SIGHUP -> passed on to all ranks, which are killed after the grace period, or at the second signal;
* SIGUSR1, SIGUSR2 -> passed on;
* a rank ends and leaves processes of its group behind -> those are ended in the same way.
"""

from __future__ import annotations

__all__ = ["Host", "Job", "free_ports", "is_this_host", "launch", "parse_hosts"]

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from hccl_fusion.errors import UsageError
from hccl_fusion.runtime.group_registry import LifecycleError
from hccl_fusion.runtime.processes import LinePrefixer, RankProcess, exit_text
from hccl_fusion.runtime.world import ADDRESSES_VARIABLE, RANK_VARIABLE, TIMEOUT_VARIABLE

_TICK_SECONDS = 0.02
_DRAIN_SECONDS = 1.0
_CHUNK_BYTES = 1 << 16
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OTHER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Host:
    """A host and how many ranks it runs."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Job:
    """What is to be started.

    Attributes:
        arguments: of the Python interpreter: `script.py`, its arguments.
        addresses: `host:port` of every rank.
        local: ranks that are started here.
        timeout_seconds: that ranks wait for each other; their own default where None.
        grace_seconds: from asking a rank to end to killing it.
        environment: what the ranks' environment is made of.
    """

    arguments: tuple[str, ...]
    addresses: tuple[str, ...]
    local: tuple[int, ...]
    timeout_seconds: float | None = None
    grace_seconds: float = 10.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def environment_of(self, rank: int) -> dict[str, str]:
        """The environment of one rank; its output is not held back in buffers."""
        environment = {"PYTHONUNBUFFERED": "1", **self.environment}
        environment[RANK_VARIABLE] = str(rank)
        environment[ADDRESSES_VARIABLE] = ",".join(self.addresses)
        if self.timeout_seconds is not None:
            environment[TIMEOUT_VARIABLE] = f"{self.timeout_seconds:g}"
        return environment


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`a:2,b:2` -> two hosts of two ranks; a host without a number has one.

    Raises:
        UsageError: no list of hosts.
    """
    hosts = []
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon or count.endswith("]"):
            name, count = part.strip(), "1"
        is_bare = not any(char.isspace() or char in ":/" for char in name)
        is_name = bool(name) and (is_bare or (name[0] + name[-1] == "[]" and name[1:-1].count("]") == 0))
        if not is_name or not (count.isascii() and count.isdigit()) or int(count) < 1:
            raise UsageError(
                "the list of hosts is illegal",
                where="option --hosts",
                found=repr(part),
                expected="host:ranks,host:ranks",
            )
        hosts.append(Host(name, int(count)))
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise UsageError("a host is named twice", where="option --hosts", found=text, expected="each once")
    return tuple(hosts)


def is_this_host(name: str) -> bool:
    """Whether a name or an address is this machine's: whether a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(name.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return name in (socket.gethostname(), socket.getfqdn())
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


@contextlib.contextmanager
def free_ports(wanted: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Holds ports for as long as the block runs, so that nobody else gets them before the ranks listen there.

    A socket that is bound but does not listen lets a server with SO_REUSEADDR, as gRPC's, in.

    Args:
        wanted: the ports; 0 for any free one.

    Raises:
        LifecycleError: a port is taken.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for port in wanted:
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind(("", port))
            except OSError as error:
                raise LifecycleError(
                    "a port cannot be used",
                    where=f"port {port}",
                    found=error.strerror,
                    expected="a free port",
                    remedy="ending the process that has it, or another --port",
                ) from error
            ports.append(holder.getsockname()[1])
        yield tuple(ports)


def launch(job: Job, out: IO[bytes] | None = None, err: IO[bytes] | None = None) -> int:
    """Runs the local ranks of a job to their end, and returns the first exit code that is not 0.

    A rank that a signal has killed counts as 128 + the signal. When this returns, none of the processes is left.

    Args:
        job: what to start.
        out: where the ranks' stdout goes, line by line with the rank in front; this process's where None.
        err: the same for stderr and messages.

    Raises:
        LifecycleError: a rank cannot be started.
    """
    run = _Run(job, out or sys.stdout.buffer, err or sys.stderr.buffer)
    with _handling(run.received):
        try:
            run.start()
            run.loop()
        finally:
            run.close()
    return run.code


@contextlib.contextmanager
def _handling(received: list[int]) -> Iterator[None]:
    """Signals are noted down for the loop."""
    before = {
        number: signal.signal(number, lambda got, _: received.append(got))
        for number in (*_ENDING_SIGNALS, *_OTHER_SIGNALS)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    def __init__(self, job: Job, out: IO[bytes], err: IO[bytes]) -> None:
        self.job = job
        self.out, self.err = out, err
        self.code = 0
        self.received: list[int] = []
        self._processes: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._failed = False
        self._asked = 0  # the ending signal that was passed on first

    def start(self) -> None:
        """Starts all local ranks and listens to their pipes."""
        for rank in self.job.local:
            command = [sys.executable, *self.job.arguments]
            process = RankProcess(rank, command, self.job.environment_of(rank))
            self._processes.append(process)
            for pipe, to in ((process.popen.stdout, self.out), (process.popen.stderr, self.err)):
                if pipe is not None:
                    os.set_blocking(pipe.fileno(), False)
                    data = (pipe, LinePrefixer(b"[%d] " % rank), to)
                    self._selector.register(pipe, selectors.EVENT_READ, data)

    def loop(self) -> None:
        """Until nothing of any rank's group runs and all of the output is shown."""
        drain_until = None
        while drain_until is None or (self._selector.get_map() and time.monotonic() < drain_until):
            self._show(_TICK_SECONDS)
            self._obey()
            self._look()
            self._kill_the_late()
            if drain_until is None and all(process.is_gone() for process in self._processes):
                # A process that has left its group may hold a pipe open for ever.
                drain_until = time.monotonic() + _DRAIN_SECONDS

    def close(self) -> None:
        """Leaves no process and no pipe behind, however the loop has ended."""
        for key in list(self._selector.get_map().values()):
            _, lines, to = key.data
            with contextlib.suppress(OSError, ValueError):
                _write(to, lines.finish())
        self._selector.close()
        for process in self._processes:
            process.reap()

    def _show(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            pipe, lines, to = key.data
            data = pipe.read(_CHUNK_BYTES)
            if data is None:
                continue
            _write(to, lines.feed(data) if data else lines.finish())
            if not data:
                self._selector.unregister(pipe)

    def _obey(self) -> None:
        while self.received:
            number = self.received.pop(0)
            is_second = bool(self._asked) and number in _ENDING_SIGNALS
            if number in _ENDING_SIGNALS:
                self._asked = self._asked or number
            for process in self._processes:
                if process.is_gone():
                    continue
                process.send(number)
                if number in _ENDING_SIGNALS:
                    self._set_deadline(process, 0 if is_second else self.job.grace_seconds)

    def _look(self) -> None:
        ended = [process for process in self._processes if process.look()]
        for process in ended:
            if not process.is_gone():
                self._end(process)
        # Of ranks that end in one tick, one that was killed is the cause rather than the effect.
        failed = sorted((process for process in ended if process.code), key=lambda process: (process.code or 0) > 0)
        if failed and not self._failed:
            self._fail(failed[0])

    def _fail(self, process: RankProcess) -> None:
        self._failed = True
        code = process.code or 0
        self.code = code if code > 0 else 128 - code
        others = [other for other in self._processes if other.code is None]
        if not self._asked:
            rest = "; the other ranks are stopped" if others else ""
            self._say(f"error: rank {process.rank} {exit_text(code)}{rest}")
        for other in others:
            self._end(other)

    def _end(self, process: RankProcess) -> None:
        if process.kill_at is None:
            process.send(signal.SIGTERM)
            self._set_deadline(process, self.job.grace_seconds)

    def _set_deadline(self, process: RankProcess, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        process.kill_at = deadline if process.kill_at is None else min(process.kill_at, deadline)

    def _kill_the_late(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            if process.kill_at is not None and now >= process.kill_at and not process.is_gone():
                if process.code is None:
                    self._say(f"rank {process.rank} did not end within {self.job.grace_seconds:g} s and is killed")
                process.send(signal.SIGKILL)
                process.kill_at = now + self.job.grace_seconds

    def _say(self, text: str) -> None:
        _write(self.err, f"hccl-fusion run: {text}\n".encode())


def _write(stream: Any, data: bytes) -> None:
    if data:
        stream.write(data)
        stream.flush()
