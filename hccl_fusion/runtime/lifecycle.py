"""Starting and ending: `init()` at the top of a training script, `shutdown()` at its end.

    import hccl_fusion
    hccl_fusion.init()                                    # finds the world, starts the server, ranks agree
    with tf.compat.v1.Session(hccl_fusion.session_target(), config=hccl_fusion.session_config()) as session:
        ...                                               # TF2 needs neither: eager code and tf.function just run
    hccl_fusion.shutdown()

A world of one needs no server, loads no TensorFlow, and everything works. TensorFlow cannot stop a server: a process
has one world of several ranks in its life.
"""

from __future__ import annotations

__all__ = [
    "collective_device",
    "init",
    "is_initialised",
    "local_rank",
    "local_size",
    "naming_lost_ranks",
    "rank",
    "session_config",
    "session_target",
    "shutdown",
    "size",
    "timeout_seconds",
]

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hccl_fusion.errors import HcclFusionError, StrategyError
from hccl_fusion.registry import DEFAULT_GROUP, check_recorded_groups, reset_split_strategy, set_membership_check
from hccl_fusion.runtime import group_registry
from hccl_fusion.runtime.group_registry import LifecycleError, current_world
from hccl_fusion.runtime.world import DEFAULT_TIMEOUT_SECONDS, World, find_timeout_seconds, find_world

_logger = logging.getLogger("hccl_fusion")
_LEAST_TALK_SECONDS = 1.0


class _Process:
    """What this process has; the lock is held while it starts or ends."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.served: World | None = None  # the world whose server runs; it runs until the process ends
        self.timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        self.has_lost_a_rank = False  # TensorFlow refuses every collective after that


_process = _Process()


def init(*, timeout_seconds: float | None = None, environ: Mapping[str, str] | None = None) -> World:
    """Starts this rank: finds the world, starts the server, and returns when all ranks are there and agree.

    Must come before TensorFlow runs anything, since collectives are switched on when its runtime starts. A second call
    changes nothing and returns the world.

    Args:
        timeout_seconds: for waiting for other ranks, here and wherever the library waits; `HCCL_FUSION_TIMEOUT` or 120
            where None.
        environ: what describes the world (module `world`); the process's environment where None.

    Raises:
        WorldError: the environment describes no world.
        StrategyError: a group or a strategy that came before does not fit the world.
        AgreementError: ranks differ in version, world or groups.
        RankLostError: a rank does not answer.
        LifecycleError: the port is taken, a rank does not start within the timeout, or TensorFlow is in use already.
    """
    with _process.lock:
        if group_registry.is_open():
            return current_world("init")
        variables = os.environ if environ is None else environ
        seconds = _checked_timeout(timeout_seconds, variables)
        world = find_world(variables)
        groups = group_registry.defined_groups()
        for group, ranks in groups.items():
            group_registry.check_against_world(group, ranks, world)
        check_recorded_groups(lambda group: world.rank in _members(group, world, groups))
        if world.size > 1:
            _start(world, groups, seconds)
        _process.timeout_seconds = seconds
        group_registry.open_world(world, _agreement(world, seconds) if world.size > 1 else None)
        set_membership_check(_check_membership)
        return world


def shutdown() -> None:
    """Ends this rank's part: waits until all ranks are here, then forgets groups and registered strategies.

    Without the wait a rank that leaves could take away results that others still fetch from it. There is none after a
    rank was lost, or while an exception is on its way out (`finally: shutdown()`). Does nothing before `init`.
    """
    with _process.lock:
        if not group_registry.is_open():
            return
        world = current_world("shutdown")
        if world.size > 1 and not _process.has_lost_a_rank and sys.exc_info()[0] is None:
            _part(world)
        set_membership_check(None)
        reset_split_strategy()
        group_registry.close_world()


def is_initialised() -> bool:
    """Whether `init` has succeeded and `shutdown` has not been called."""
    return group_registry.is_open()


def rank() -> int:
    """This process's rank in the world."""
    return current_world("rank()").rank


def size() -> int:
    """How many ranks the world has."""
    return current_world("size()").size


def local_rank() -> int:
    """This rank's position among the ranks of its server."""
    return current_world("local_rank()").local_rank


def local_size() -> int:
    """How many ranks this rank's server has."""
    return current_world("local_size()").local_size


def timeout_seconds() -> float:
    """The timeout that `init` was given: for `timeout_seconds` of collectives."""
    current_world("timeout_seconds()")
    return _process.timeout_seconds


def session_target() -> str:
    """The target of TF1 sessions: this rank's own server; "" in a world of one.

    All ranks must run the steps that reduce with CollectiveReduceV2 equally often: TensorFlow numbers the steps of
    sessions across the world.
    """
    world = current_world("session_target()")
    return f"grpc://{world.addresses[world.rank]}" if world.size > 1 else ""


def session_config(config: Any = None) -> Any:
    """Returns the `ConfigProto` of TF1 sessions: a copy of the user's, with what collectives need.

    Args:
        config: a `tf.compat.v1.ConfigProto`, or None. Its own device filters stay.
    """
    from tensorflow.core.protobuf import config_pb2

    world = current_world("session_config()")
    complete = config_pb2.ConfigProto()
    if config is not None:
        complete.CopyFrom(config)
    if world.size > 1:
        from hccl_fusion.runtime.tf_server import LEADER

        complete.experimental.collective_group_leader = LEADER
        if not complete.device_filters:
            # Opening a session would wait for the servers of all ranks otherwise.
            complete.device_filters.append(f"/job:worker/task:{world.rank}")
    return complete


def collective_device(kind: str = "CPU") -> str:
    """The device on which this rank's collectives are placed.

    Args:
        kind: `CPU` or `GPU`.
    """
    from hccl_fusion.runtime.tf_server import rank_device

    world = current_world("collective_device()")
    return rank_device(world.rank, kind) if world.size > 1 else f"/device:{kind}:0"


@contextmanager
def naming_lost_ranks(when: str) -> Iterator[None]:
    """Turns TensorFlow's errors of collectives inside the block into one line that names the ranks that are gone.

    Args:
        when: what was being done, as part of the message: `while segment 3 was reduced`.

    Raises:
        RankLostError: a rank has ended, or did not come within the timeout of the collective.
    """
    from hccl_fusion.runtime.handshake import RankLostError, collective_failures

    try:
        with collective_failures(current_world("naming_lost_ranks()"), when):
            yield
    except RankLostError:
        _process.has_lost_a_rank = True
        raise


def _checked_timeout(seconds: float | None, environ: Mapping[str, str]) -> float:
    if seconds is None:
        return find_timeout_seconds(environ)
    if not 0 < seconds < float("inf"):
        raise LifecycleError("the timeout is illegal", where="init", found=seconds, expected="seconds above 0")
    return float(seconds)


def _start(world: World, groups: Mapping[str, tuple[int, ...]], seconds: float) -> None:
    from hccl_fusion.runtime import handshake, tf_server

    if _process.served is not None:
        raise LifecycleError(
            "TensorFlow cannot start a second server in a process",
            where="init",
            found=f"the server of an earlier init() at {_process.served.addresses[_process.served.rank]}",
            expected="one world of several ranks in a process",
            remedy="a new process",
        )
    tf_server.check_port(world)
    tf_server.start_server(world)
    _process.served = world
    deadline = time.monotonic() + seconds  # loading TensorFlow does not count
    tf_server.wait_for_ranks(world, deadline, seconds)
    handshake.agree_on_world(world, groups, max(_LEAST_TALK_SECONDS, deadline - time.monotonic()))


def _agreement(world: World, seconds: float) -> group_registry.Agreement:
    from hccl_fusion.runtime.handshake import agree_on_group

    return lambda group, ranks: agree_on_group(world, group, ranks, seconds)


def _part(world: World) -> None:
    """A rank that has gone already is no error any more."""
    from hccl_fusion.runtime import tf_server
    from hccl_fusion.runtime.handshake import collective_failures

    seconds = _process.timeout_seconds
    try:
        with collective_failures(world, "while the ranks shut down", seconds):
            tf_server.meet(world.rank, world.size, seconds)
    except HcclFusionError as error:
        _logger.warning("%s", error)


def _members(group: str, world: World, groups: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return groups.get(group, tuple(range(world.size)) if group == DEFAULT_GROUP else ())


def _check_membership(group: str) -> None:
    """What the setters of strategies ask."""
    world = current_world("set_split_strategy")
    if world.rank not in group_registry.group_ranks(group, "set_split_strategy"):
        raise StrategyError(
            f"rank {world.rank} is not in the group {group!r}",
            where="set_split_strategy",
            expected="calls on members of the group only",
            remedy="the call inside `if` on the ranks of the group",
        )
