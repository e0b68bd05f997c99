"""Errors of hccl_fusion; the root and the graph errors come from `graph_passes.errors`.

HcclFusionError
├── GraphFileError, GraphError, ReductionError, PassError, VerificationError   (graph_passes)
├── StrategyError (also a ValueError)   a strategy, a group or a list that HCCL would refuse
├── PlanError                           a plan file is malformed or does not fit the graph
├── UsageError                          options that contradict each other or are missing
├── NumericCheckError                   a graph cannot be run on in-process ranks
├── RankTableError                      a rank table is malformed                  (runtime.rank_table)
├── WorldError                          the environment contradicts itself         (runtime.world)
└── LifecycleError                      the ranks cannot be started                (runtime.group_registry)
    ├── NotInitialisedError             something needs `init()` first; also a ValueError
    ├── AgreementError                  the ranks differ in what must be equal     (runtime.handshake)
    └── RankLostError                   another rank is gone                       (runtime.handshake)
"""

from __future__ import annotations

__all__ = [
    "GraphError",
    "GraphFileError",
    "HcclFusionError",
    "NumericCheckError",
    "PassError",
    "PlanError",
    "ReductionError",
    "StrategyError",
    "StrategyWarning",
    "UsageError",
    "VerificationError",
    "summarise",
]

from graph_passes.errors import (
    GraphError,
    GraphFileError,
    HcclFusionError,
    PassError,
    ReductionError,
    VerificationError,
    summarise,
)


class StrategyError(HcclFusionError, ValueError):
    """A strategy is illegal; a ValueError too, since scripts written for HCCL catch that."""


class PlanError(HcclFusionError):
    """A plan file is malformed or does not fit the graph."""


class UsageError(HcclFusionError):
    """Options contradict each other, or one is missing."""


class NumericCheckError(HcclFusionError):
    """A graph cannot be run on in-process ranks."""


class StrategyWarning(UserWarning):
    """A strategy is accepted here but HCCL would treat it differently."""
