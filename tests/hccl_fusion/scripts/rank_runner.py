"""What the multi-process tests share: processes that never outlive a test, and deadlines instead of sleeps."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hccl_fusion.runtime.group_registry import LifecycleError
from hccl_fusion.runtime.launcher import free_ports

SCRIPTS = Path(__file__).parent
ROOT = SCRIPTS.parents[2]
DEADLINE_SECONDS = 100.0
_OURS = ("HCCL_FUSION_", "RANK_", "DEVICE_ID", "TF_CONFIG")


@dataclass(frozen=True)
class Result:
    """How a process ended."""

    code: int
    out: str
    err: str


def environment(**variables):
    """This process's environment, without what describes a world, and with the checkout on the path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return {**inherited, **quiet, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **variables}


@contextlib.contextmanager
def started(arguments, **variables):
    """A Python process in a group of its own, which is killed with all that it has started when the block ends."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def finish(process, seconds=DEADLINE_SECONDS):
    """Waits for a process and returns how it ended."""
    out, err = process.communicate(timeout=seconds)
    return Result(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def run_ranks(script, variables_of_ranks, *arguments):
    """Runs a script once for each set of variables, all at a time."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started([SCRIPTS / script, *arguments], **variables))
            for variables in variables_of_ranks
        ]
        return [finish(process) for process in processes]


@contextlib.contextmanager
def launcher_variables(count, timeout=30):
    """What the launcher would set for each rank of a local world."""
    with free_ports([0] * count) as ports:
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield [
            {
                "HCCL_FUSION_RANK": str(rank),
                "HCCL_FUSION_ADDRESSES": addresses,
                "HCCL_FUSION_TIMEOUT": str(timeout),
            }
            for rank in range(count)
        ]


@contextlib.contextmanager
def consecutive_ports(count):
    """Holds free ports in a row, and yields the first."""
    for _ in range(100):
        with free_ports([0]) as (base,):
            pass
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(free_ports(range(base, base + count)))
            except (LifecycleError, OverflowError):
                continue
            yield base
            return
    raise AssertionError(f"no {count} free ports in a row")


def poll(condition, what, seconds=20.0):
    """Returns the first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {what}")


def runs(pid):
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
