"""A whole `hccl-fusion fuse` of the ResNet-50 graph, as a process, against `python -c "import tensorflow"`.

The two take turns, so that a busy machine slows both. The target is a quarter: docs/design.md.
"""

from __future__ import annotations

__all__ = ["main", "measure"]

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

ROUNDS = 11
TARGET = 0.25


def _run(arguments: Sequence[str]) -> int:
    """Time of a process in ns, from its start to its end."""
    start = time.perf_counter_ns()
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter_ns() - start


def measure(rounds: int) -> tuple[float, float]:
    """Medians in ns: the fusion, and the import."""
    with tempfile.TemporaryDirectory() as folder:
        graph, fused = os.path.join(folder, "resnet50.pb"), os.path.join(folder, "fused.pb")
        _run([sys.executable, "-m", "hccl_fusion.demo.resnet50", "-o", graph])
        fuse = [sys.executable, "-m", "hccl_fusion", "fuse", graph, "-o", fused, "--idx", "86,160"]
        load = [sys.executable, "-c", "import tensorflow"]
        for command in (fuse, load):  # files are in the page cache, bytecode is compiled
            _run(command)
        times = [(_run(fuse), _run(load)) for _ in range(rounds)]
    fusions, imports = zip(*times)
    return statistics.median(fusions), statistics.median(imports)


def main() -> None:
    """Prints one row."""
    fusion, load = measure(ROUNDS)
    print("| hccl-fusion fuse, 161 gradients | python -c 'import tensorflow' | ratio | target |")
    print("|---|---|---|---|")
    print(f"| {fusion / 1e6:,.0f} ms | {load / 1e6:,.0f} ms | {fusion / load:.2f} | {TARGET} |")


if __name__ == "__main__":
    main()
