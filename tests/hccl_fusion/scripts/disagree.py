"""Rank 1 has another version, and other ranks in a group, than rank 0."""

from __future__ import annotations

import sys

import hccl_fusion
import hccl_fusion.groups as groups
from hccl_fusion.runtime import lifecycle
from hccl_fusion.runtime.world import find_world

if __name__ == "__main__":
    import os

    if find_world(os.environ).rank == 1:
        hccl_fusion.__version__ = "0.0.1"
        groups.create_group("pair", 2, [1, 0])
        groups.create_group("mine", 2, [0, 1])
    else:
        groups.create_group("pair", 2, [0, 1])
    try:
        lifecycle.init()
    except hccl_fusion.HcclFusionError as error:
        sys.exit(f"{type(error).__name__}: {error}")
