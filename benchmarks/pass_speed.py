"""The whole pass pipeline against parsing plus serialising the same graph, time and memory, at four sizes.

Each size runs in a process of its own, so that one size's memory does not serve the next. The limits are those of
docs/design.md: 4 times the floor in time, 4 times the parsed message in memory, cost a node within 1.5 over the range.
"""

from __future__ import annotations

__all__ = ["main", "measure"]

import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

SIZES = ((5_000, 160), (50_000, 1_000), (500_000, 10_000), (1_000_000, 20_000))


def _resident_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("VmRSS"))


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(nodes: int, gradients: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, in ns; memory in KiB of the first round."""
    from benchmarks.graphs import training_graph
    from graph_passes.messages import GraphDef
    from hccl_fusion.fuse import fuse
    from hccl_fusion.strategy import Strategy

    content = _in_child(nodes, gradients)
    fuse(training_graph(200, 5))  # imports and tables are loaded before anything is measured
    base_kib = _resident_kib()
    times: dict[str, list[int]] = {"parse": [], "serialise": [], "pipeline": []}
    memory = {}
    passes: dict[str, list[int]] = {}
    strategy = Strategy.parse_size("20,20,20,20,20")
    for round_number in range(rounds):
        start = time.perf_counter_ns()
        graph = GraphDef.FromString(content)
        times["parse"].append(time.perf_counter_ns() - start)
        if round_number == 0:
            memory["parsed"] = _resident_kib() - base_kib
        start = time.perf_counter_ns()
        result = fuse(
            graph, strategy, infer_shapes=False, observe=lambda p, _, ns: passes.setdefault(p.name, []).append(ns)
        )
        times["pipeline"].append(time.perf_counter_ns() - start)
        if round_number == 0:
            memory["peak"] = _peak_kib() - base_kib
        start = time.perf_counter_ns()
        graph.SerializeToString(deterministic=True)
        times["serialise"].append(time.perf_counter_ns() - start)
        count = len(graph.node)
        del graph, result
    return {
        "nodes": count,
        "gradients": gradients,
        **{name: statistics.median(values) for name, values in times.items()},
        "passes": {name: statistics.median(values) for name, values in passes.items()},
        "parsed_kib": memory["parsed"],
        "peak_kib": memory["peak"],
    }


def _in_child(nodes: int, gradients: int) -> bytes:
    """The serialised graph, built by another process: building it must not count as this one's peak memory."""
    code = (
        "import sys; from benchmarks.graphs import training_graph; "
        f"sys.stdout.buffer.write(training_graph({nodes}, {gradients}).SerializeToString())"
    )
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout


def main() -> None:
    """Prints one row a size."""
    print("| nodes | gradients | parse + serialise | pipeline | ratio | ns a node | peak memory / parsed message |")
    print("|---|---|---|---|---|---|---|")
    costs = []
    for nodes, gradients in SIZES:
        rounds = 9 if nodes < 100_000 else 3
        command = [sys.executable, "-m", "benchmarks.pass_speed", "--measure", str(nodes), str(gradients), str(rounds)]
        row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        floor = row["parse"] + row["serialise"]
        costs.append(row["pipeline"] / row["nodes"])
        print(
            f"| {row['nodes']:,} | {gradients:,} | {floor / 1e6:,.0f} ms | {row['pipeline'] / 1e6:,.0f} ms "
            f"| {row['pipeline'] / floor:.2f} | {costs[-1]:,.0f} | {row['peak_kib'] / row['parsed_kib']:.2f} |",
            flush=True,
        )
        detail = ", ".join(f"{name} {ns / floor:.2f}" for name, ns in row["passes"].items())
        print(f"<!-- of the floor: {detail} -->", flush=True)
    print(f"\nCost a node, highest over lowest: {max(costs) / min(costs):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*map(int, sys.argv[2:5]))))
    else:
        main()
