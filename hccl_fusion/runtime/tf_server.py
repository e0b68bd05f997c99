"""TensorFlow's side of a rank: its gRPC server, and small collectives that ranks use to talk about themselves.

One server a process carries both worlds: eager code and `tf.function` after `enable_collective_ops`, and TF1 sessions
whose target is the server's own address. Everything private of TensorFlow that ranks need is in this module.

The small collectives run eagerly, even in scripts that have switched eager execution off: in a session the steps of
all ranks are numbered together, so that a collective of a subgroup would put its members out of step with the rest.
"""

from __future__ import annotations

__all__ = [
    "LEADER",
    "TALK_GROUP_KEY",
    "check_port",
    "gather_text",
    "meet",
    "rank_device",
    "start_server",
    "unreachable_ranks",
    "wait_for_ranks",
]

import hashlib
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from hccl_fusion.errors import summarise
from hccl_fusion.runtime.group_registry import LifecycleError
from hccl_fusion.runtime.world import World, split_address

LEADER = "/job:worker/replica:0/task:0"
"""The rank that TensorFlow's collectives meet at."""

TALK_GROUP_KEY = 2**31 - 1
"""Collective key of the world for talks among ranks; `group_keys` never gives it to a group."""

_LENGTH_INSTANCE, _TEXT_INSTANCE, _MEET_INSTANCE = 2**31 - 1, 2**31 - 2, 2**31 - 3
_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 1.0
_WORD = np.dtype("<i4")
_PIECE_BYTES = 4096
_NO_PROXY = "no_grpc_proxy"  # gRPC reads this spelling only


def rank_device(rank: int, kind: str = "CPU") -> str:
    """The device of a rank's collectives, as the whole world names it."""
    return f"/job:worker/replica:0/task:{rank}/device:{kind}:0"


def check_port(world: World) -> None:
    """Checks that this rank's port is free, which TensorFlow would report without naming it.

    Raises:
        LifecycleError: something listens there already.
    """
    address = world.addresses[world.rank]
    _, port = split_address(address, world.source)
    with socket.socket() as probe:
        # As gRPC does: without it, connections of an earlier run that linger would count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LifecycleError(
                f"the port of rank {world.rank} cannot be used",
                where=address,
                found=error.strerror,
                expected="a free port",
                remedy="ending the process that has it, or another port (HCCL_FUSION_PORT, TF_CONFIG)",
            ) from error


def start_server(world: World) -> None:
    """Starts this process's server and enables collectives; returns without waiting for other ranks.

    Raises:
        LifecycleError: TensorFlow has run something already, or cannot start a server.
    """
    import tensorflow as tf
    from tensorflow.core.protobuf import config_pb2, tensorflow_server_pb2
    from tensorflow.python.eager import context as eager_context

    context = eager_context.context()
    if context._initialized:
        raise _too_late()
    _exempt_from_proxies(split_address(address, world.source)[0] for address in world.addresses)
    config = config_pb2.ConfigProto()
    config.experimental.collective_group_leader = LEADER
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({"worker": list(world.addresses)}).as_cluster_def(),
        job_name="worker",
        task_index=world.rank,
        protocol="grpc",
        default_session_config=config,
    )
    try:
        context.configure_collective_ops(collective_leader=LEADER)
        context.enable_collective_ops(server)
        context.ensure_initialized()
    except (RuntimeError, ValueError, tf.errors.OpError) as error:
        raise LifecycleError(
            f"TensorFlow cannot start the server of rank {world.rank}",
            where=world.addresses[world.rank],
            found=_first_line(error),
            remedy="a free port, and hccl_fusion.init() before anything else of TensorFlow's runtime",
        ) from error


def wait_for_ranks(world: World, deadline: float, timeout_seconds: float) -> None:
    """Returns when every rank listens at its address.

    Raises:
        LifecycleError: some do not at the deadline (`time.monotonic`); names them.
    """
    missing = [rank for rank in range(world.size) if rank != world.rank]
    while True:
        missing = [rank for rank in missing if not _answers(world.addresses[rank], deadline)]
        if not missing:
            return
        if time.monotonic() >= deadline:
            raise LifecycleError(
                f"rank {world.rank} waited {timeout_seconds:g} s and not all ranks have started",
                found=f"no answer from {_named(world, missing)}",
                expected=f"{world.size} ranks ({world.source})",
                remedy="the output of those ranks, the network between the hosts, or a larger HCCL_FUSION_TIMEOUT",
            )
        time.sleep(_POLL_SECONDS)


def unreachable_ranks(world: World) -> str:
    """Names the other ranks that do not listen at their addresses now; "" where all do."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    others = [rank for rank in range(world.size) if rank != world.rank]
    return _named(world, [rank for rank in others if not _answers(world.addresses[rank], deadline)])


def gather_text(text: str, rank: int, ranks: int, group_key: int, timeout_seconds: float) -> list[str]:
    """Returns the text of every rank of a group; where all are equal, only their digests travel.

    Args:
        text: this rank's.
        rank: this rank's number in the world.
        ranks: how many the group has.
        group_key: of the group; its highest instance keys are used.
        timeout_seconds: after which waiting for another rank is an error of TensorFlow's.
    """
    encoded = text.encode("utf-8")
    digest = np.frombuffer(hashlib.sha256(encoded).digest(), _WORD)
    row = np.concatenate([np.array([len(encoded)], _WORD), digest])
    rows = _gather(row, rank, ranks, group_key, _LENGTH_INSTANCE, timeout_seconds)
    if (rows == rows[0]).all():
        return [text] * ranks
    # An instance key has one shape for ever, so the text travels in pieces of one size.
    pieces = -(-int(rows[:, 0].max()) // _PIECE_BYTES)
    padded = np.frombuffer(encoded.ljust(pieces * _PIECE_BYTES, b"\0"), _WORD).reshape(pieces, -1)
    parts = [_gather(piece, rank, ranks, group_key, _TEXT_INSTANCE, timeout_seconds) for piece in padded]
    whole = np.concatenate(parts, axis=1)
    return [line.tobytes()[:length].decode("utf-8") for line, length in zip(whole, rows[:, 0])]


def meet(rank: int, ranks: int, timeout_seconds: float) -> None:
    """Waits until all ranks of the world are here."""
    _gather(np.zeros(1, _WORD), rank, ranks, TALK_GROUP_KEY, _MEET_INSTANCE, timeout_seconds)


def _gather(row: Any, rank: int, ranks: int, group_key: int, instance_key: int, timeout_seconds: float) -> Any:
    import tensorflow as tf
    from tensorflow.python.eager import context as eager_context

    with eager_context.eager_mode(), tf.device(rank_device(rank)):
        rows = tf.raw_ops.CollectiveGatherV2(
            input=tf.constant(row[None], tf.int32),
            group_size=tf.constant(ranks),
            group_key=tf.constant(group_key),
            instance_key=tf.constant(instance_key),
            ordering_token=[],
            timeout_seconds=timeout_seconds,
        )
        return rows.numpy().astype(_WORD)


def _too_late() -> LifecycleError:
    return LifecycleError(
        "hccl_fusion.init() came after TensorFlow was used",
        where="init",
        found="an eager operation, a device list or a dataset ran before it",
        expected="init() right after the imports",
        remedy="moving hccl_fusion.init() to the top of the script",
    )


def _answers(address: str, deadline: float) -> bool:
    host, port = split_address(address, "address")
    seconds = max(0.1, min(_CONNECT_SECONDS, deadline - time.monotonic()))
    try:
        with socket.create_connection((host, port), seconds):
            return True
    except OSError:
        return False


def _named(world: World, ranks: Iterable[int]) -> str:
    return summarise([f"rank {rank} ({world.addresses[rank]})" for rank in ranks])


def _exempt_from_proxies(hosts: Iterable[str]) -> None:
    """gRPC obeys http_proxy; a proxy is never the way from rank to rank."""
    named = os.environ.get(_NO_PROXY) or os.environ.get("no_proxy", "")
    os.environ[_NO_PROXY] = ",".join(dict.fromkeys([*filter(None, named.split(",")), *hosts]))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
