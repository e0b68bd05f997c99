"""Starts a script on several ranks of this host: wrap_launch.py RANKS TIMEOUT SCRIPT ARGUMENT…"""

from __future__ import annotations

import sys

from hccl_fusion.runtime.launcher import Job, free_ports, launch


def main(ranks, timeout_seconds, *arguments):
    with free_ports([0] * int(ranks)) as ports:
        addresses = tuple(f"127.0.0.1:{port}" for port in ports)
        job = Job(arguments, addresses, tuple(range(int(ranks))), float(timeout_seconds), grace_seconds=5.0)
        return launch(job)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
