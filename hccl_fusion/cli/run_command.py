"""`hccl-fusion run`: starts a training script on several ranks."""

from __future__ import annotations

__all__ = ["command"]

import os
import shlex
import signal
import sys

import click

from hccl_fusion.errors import UsageError
from hccl_fusion.runtime.launcher import Host, Job, free_ports, is_this_host, launch, parse_hosts
from hccl_fusion.runtime.world import base_port

_LOOPBACK = "127.0.0.1"


@click.command(
    "run",
    short_help="Start a training script on several ranks.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("-n", "--ranks", type=click.IntRange(min=1), help="How many ranks.  [default: all of --hosts]")
@click.option("--hosts", metavar="HOST:N,…", help="Hosts and their ranks; start the same command on each.")
@click.option("--here", metavar="HOST", help="Which of --hosts this one is, where its name does not tell.")
@click.option("--port", type=click.IntRange(1, 65535), metavar="PORT",
              help="With --hosts rank r listens at PORT + r.  [default: HCCL_FUSION_PORT or 29600]")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
              help="How long ranks wait for each other.  [default: HCCL_FUSION_TIMEOUT or 120]")  # fmt: skip
@click.option("--grace", type=click.FloatRange(min=0), default=10.0, show_default=True, metavar="SECONDS",
              help="From asking a rank to end to killing it.")  # fmt: skip
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int | None,
    hosts: str | None,
    here: str | None,
    port: int | None,
    timeout: float | None,
    grace: float,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Start SCRIPT on several ranks, with everything after it as its arguments.

    Each line of output has its rank in front. When one rank fails all are ended, and its exit code is the exit code;
    128 + the signal where a signal killed it. SIGINT and SIGTERM are passed on. Nothing is started on other hosts: the
    command for each of them is printed.

    Example: hccl-fusion run -n 4 train.py --epochs 2
    """
    if not is_module and not os.path.isfile(script):
        raise UsageError("the script does not exist", where=script, expected="a Python file", remedy="-m for a module")
    placed = parse_hosts(hosts) if hosts is not None else ()
    count = _rank_count(ranks, placed)
    local_hosts = _local_hosts(placed, here)
    names = [host.name for host in placed for _ in range(host.ranks)] or [_LOOPBACK] * count
    wanted = _ports(count, port, bool(placed))
    local = [rank for rank, name in enumerate(names) if not placed or name in local_hosts]
    python = (("-m", script) if is_module else (script,)) + arguments
    for host in placed:
        if host.name not in local_hosts:
            other = _remote_command(hosts, host, wanted[0], timeout, grace, python)
            click.echo(f"start on {host.name}: {other}", err=True)
    with free_ports([wanted[rank] for rank in local]) as ports:
        held = dict(zip(local, ports))
        addresses = tuple(f"{name}:{held.get(rank, wanted[rank])}" for rank, name in enumerate(names))
        code = _launch(Job(python, addresses, tuple(local), timeout, grace))
    click.get_current_context().exit(code)


def _launch(job: Job) -> int:
    try:
        return launch(job)
    except BrokenPipeError:
        # Whoever read the output has gone. The ranks have been ended, which must not look like success.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        click.echo("hccl-fusion run: nobody reads the output any more; all ranks are ended", err=True)
        return 128 + signal.SIGPIPE


def _rank_count(ranks: int | None, hosts: tuple[Host, ...]) -> int:
    total = sum(host.ranks for host in hosts)
    if ranks is None and not hosts:
        raise UsageError("the number of ranks is missing", where="hccl-fusion run", expected="-n N or --hosts HOST:N,…")
    if ranks is not None and hosts and ranks != total:
        raise UsageError(
            "-n and --hosts contradict each other", found=f"{ranks} and {total} ranks", expected="one of them"
        )
    return ranks if ranks is not None else total


def _ports(count: int, port: int | None, has_hosts: bool) -> list[int]:
    """The port of each rank: any free one (0) on this host alone, known to every launcher with --hosts."""
    if not has_hosts:
        if port is not None:
            raise UsageError("--port needs --hosts", where="option --port", expected="--hosts HOST:N,…")
        return [0] * count
    base = port if port is not None else base_port(os.environ)
    if base + count - 1 > 65535:
        raise UsageError("the ports of all ranks do not fit", where="option --port", found=base, expected="less")
    return [base + rank for rank in range(count)]


def _local_hosts(hosts: tuple[Host, ...], here: str | None) -> set[str]:
    names = [host.name for host in hosts]
    if here is not None and not hosts:
        raise UsageError("--here needs --hosts", where="option --here", expected="--hosts HOST:N,…")
    if here is not None and here not in names:
        raise UsageError("this host is not in the list", where="option --here", found=here, expected=" or ".join(names))
    local = {here} if here is not None else {name for name in names if is_this_host(name)}
    if hosts and not local:
        raise UsageError(
            "no host of the list is this one", where="option --hosts", found=", ".join(names), remedy="--here HOST"
        )
    return local


def _remote_command(
    hosts: str | None, host: Host, port: int, timeout: float | None, grace: float, python: tuple[str, ...]
) -> str:
    options = ["--hosts", hosts or "", "--here", host.name, "--port", str(port), "--grace", f"{grace:g}"]
    if timeout is not None:
        options += ["--timeout", f"{timeout:g}"]
    return shlex.join(["hccl-fusion", "run", *options, *python])
