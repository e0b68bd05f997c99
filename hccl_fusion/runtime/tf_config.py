"""Reads TF_CONFIG, TensorFlow's own description of a cluster: which ranks there are, and which one this process is."""

from __future__ import annotations

__all__ = ["TfConfig", "WorldError", "parse_tf_config"]

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hccl_fusion.errors import HcclFusionError

_RANK_JOBS = ("chief", "worker")
_OTHER_JOBS = ("evaluator",)  # takes no part in training
_WHERE = "variable TF_CONFIG"


class WorldError(HcclFusionError):
    """The environment describes no world, or contradicts itself."""


@dataclass(frozen=True)
class TfConfig:
    """The tasks that are ranks.

    Attributes:
        rank: this process's; the chief, where there is one, is rank 0.
        addresses: of all ranks, as they are written.
    """

    rank: int
    addresses: tuple[object, ...]


def parse_tf_config(text: str) -> TfConfig | None:
    """Parses the variable; None where it names no cluster, as on a single machine of a managed service.

    Raises:
        WorldError: malformed, a job that cannot be a rank, or a task that is none.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorldError(
            "TF_CONFIG is no JSON", where=_WHERE, found=str(error), expected="TensorFlow's format"
        ) from error
    cluster = _object(config, "cluster")
    if not cluster:
        return None
    for job, tasks in cluster.items():
        place = f"{_WHERE}, cluster.{job}"
        if job not in (*_RANK_JOBS, *_OTHER_JOBS):
            raise WorldError("a job of TF_CONFIG cannot be a rank", where=place, expected="chief and worker only")
        if not isinstance(tasks, list):
            raise WorldError("a job of TF_CONFIG is no list of addresses", where=place, found=tasks)
    addresses = tuple(address for job in _RANK_JOBS for address in cluster.get(job, []))
    return TfConfig(_rank(_object(config, "task"), cluster), addresses)


def _rank(task: Mapping[str, Any], cluster: Mapping[str, Any]) -> int:
    job, index = task.get("type"), task.get("index")
    if isinstance(index, str) and index.isascii() and index.isdigit():
        index = int(index)
    if job not in _RANK_JOBS or not cluster.get(job):
        raise WorldError(
            "this task of TF_CONFIG is no rank",
            where=f"{_WHERE}, task.type",
            found=repr(job),
            expected=" or ".join(job for job in _RANK_JOBS if cluster.get(job)) or "a cluster with workers",
        )
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(cluster[job]):
        raise WorldError(
            "this task of TF_CONFIG is not in its cluster",
            where=f"{_WHERE}, task.index",
            found=repr(index),
            expected=f"0 to {len(cluster[job]) - 1}",
        )
    return index + (len(cluster.get("chief", [])) if job == "worker" else 0)


def _object(config: Any, key: str) -> dict[str, Any]:
    value = config.get(key, {}) if isinstance(config, dict) else config
    if not isinstance(value, dict):
        raise WorldError(
            "TF_CONFIG has the wrong type", where=f"{_WHERE}, {key}", found=repr(value), expected="an object"
        )
    return value
