"""The ranks define a group differently, go on all the same, and then rank 1 is killed between two reductions."""

from __future__ import annotations

import os
import signal
import sys
import time

import tensorflow as tf
from sum_of_ranks import reduce_sum

import hccl_fusion.groups as groups
from hccl_fusion.errors import HcclFusionError
from hccl_fusion.runtime import lifecycle


def main():
    world = lifecycle.init()
    try:
        groups.create_group("pair", 2, [0, 1] if world.rank == 0 else [1, 0])
    except HcclFusionError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    print("sum", float(reduce_sum(tf.constant([1.0]))[0]), flush=True)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        with lifecycle.naming_lost_ranks("while segment 3 was reduced"):
            reduce_sum(tf.constant([1.0]), timeout_seconds=4)
    except HcclFusionError as error:
        lifecycle.shutdown()  # no wait for the dead
        print("ended within seconds", time.monotonic() - started < 10)
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
