"""HCCL's module of the split setters: `hccl.split.api` under our own name."""

from __future__ import annotations

__all__ = ["reset_split_strategy", "set_split_strategy_by_idx", "set_split_strategy_by_size"]

from hccl_fusion.registry import (
    reset_split_strategy,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
)
