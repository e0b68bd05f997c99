"""Starts, and says how that went."""

from __future__ import annotations

import sys

from hccl_fusion.errors import HcclFusionError
from hccl_fusion.runtime import lifecycle

if __name__ == "__main__":
    try:
        print(lifecycle.init())
    except HcclFusionError as error:
        sys.exit(f"{type(error).__name__}: {error}")
