"""Shows, plans, rewrites and verifies the fusion of gradient all-reduces in TensorFlow training graphs.

The public names are loaded on first use, so that `import hccl_fusion` stays fast; TensorFlow's runtime is loaded only
by what runs a graph.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = [
    "BroadcastCallback",
    "BroadcastHook",
    "DistributedOptimizer",
    "Emit",
    "FuseResult",
    "HcclFusionError",
    "NPUDistributedOptimizer",
    "Plan",
    "PlanOptions",
    "Strategy",
    "StrategyError",
    "StrategyKind",
    "StrategyWarning",
    "broadcast_variables",
    "collective_device",
    "compare_graphs",
    "fuse",
    "init",
    "is_initialised",
    "list_gradients",
    "local_rank",
    "local_size",
    "plan_graph",
    "rank",
    "read_plan",
    "reduce_tensors",
    "reset_split_strategy",
    "segment_boundaries",
    "session_config",
    "session_target",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "shutdown",
    "simulate_ranks",
    "size",
]

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hccl_fusion.boundaries import PlanOptions
    from hccl_fusion.errors import HcclFusionError, StrategyError, StrategyWarning
    from hccl_fusion.fuse import Emit, FuseResult, fuse, list_gradients, plan_graph
    from hccl_fusion.plan import Plan
    from hccl_fusion.plan_file import read_plan
    from hccl_fusion.registry import (
        reset_split_strategy,
        set_split_strategy_by_idx,
        set_split_strategy_by_size,
    )
    from hccl_fusion.runtime.broadcast import BroadcastCallback, BroadcastHook, broadcast_variables
    from hccl_fusion.runtime.in_process import simulate_ranks
    from hccl_fusion.runtime.lifecycle import (
        collective_device,
        init,
        is_initialised,
        local_rank,
        local_size,
        rank,
        session_config,
        session_target,
        shutdown,
        size,
    )
    from hccl_fusion.runtime.numeric_check import compare_graphs
    from hccl_fusion.runtime.optimizer import DistributedOptimizer, NPUDistributedOptimizer
    from hccl_fusion.runtime.reduce import reduce_tensors
    from hccl_fusion.segmentation import segment_boundaries
    from hccl_fusion.strategy import Strategy, StrategyKind

_HOME = {
    "Emit": "fuse", "FuseResult": "fuse", "fuse": "fuse", "list_gradients": "fuse", "plan_graph": "fuse",
    "HcclFusionError": "errors", "StrategyError": "errors", "StrategyWarning": "errors",
    "Plan": "plan", "PlanOptions": "boundaries", "read_plan": "plan_file",
    "Strategy": "strategy", "StrategyKind": "strategy", "segment_boundaries": "segmentation",
    "reset_split_strategy": "registry", "set_split_strategy_by_idx": "registry",
    "set_split_strategy_by_size": "registry",
    "collective_device": "runtime.lifecycle", "init": "runtime.lifecycle", "is_initialised": "runtime.lifecycle",
    "local_rank": "runtime.lifecycle", "local_size": "runtime.lifecycle", "rank": "runtime.lifecycle",
    "session_config": "runtime.lifecycle", "session_target": "runtime.lifecycle", "shutdown": "runtime.lifecycle",
    "size": "runtime.lifecycle",
    "BroadcastCallback": "runtime.broadcast", "BroadcastHook": "runtime.broadcast",
    "broadcast_variables": "runtime.broadcast", "DistributedOptimizer": "runtime.optimizer",
    "NPUDistributedOptimizer": "runtime.optimizer", "reduce_tensors": "runtime.reduce",
    "compare_graphs": "runtime.numeric_check", "simulate_ranks": "runtime.in_process",
}  # fmt: skip


class _Package(types.ModuleType):
    """Lets no module hide a public name: the import system binds the module `fuse` here, where the function belongs."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, types.ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
