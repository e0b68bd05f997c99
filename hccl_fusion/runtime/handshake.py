"""All ranks compare what they believe about the world and about groups, before the first training step does it badly.

Each rank makes a statement; the statements are gathered, and every rank compares all of them, so that a difference is
the same error everywhere.
"""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "RankLostError",
    "Statement",
    "agree_on_group",
    "agree_on_world",
    "collective_failures",
    "differences",
]

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import hccl_fusion
from graph_passes.lower import group_keys
from hccl_fusion.errors import summarise
from hccl_fusion.runtime import tf_server
from hccl_fusion.runtime.group_registry import LifecycleError, check_key_clashes
from hccl_fusion.runtime.world import World

_DYING_SECONDS = 2.0
_POLL_SECONDS = 0.05


class AgreementError(LifecycleError):
    """Ranks differ in version, world or groups."""


class RankLostError(LifecycleError):
    """Another rank has ended, does not answer, or does not come to a collective."""


@dataclass(frozen=True)
class Statement:
    """What one rank believes.

    Attributes:
        version: of this library.
        addresses: of all ranks.
        groups: ranks of each group that it has created, by name.
    """

    version: str
    addresses: tuple[str, ...]
    groups: Mapping[str, tuple[int, ...]]

    def to_json(self) -> str:
        """One line; equal statements give equal text."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Statement:
        """Reads what `to_json` has written."""
        value = json.loads(text)
        groups = {name: tuple(ranks) for name, ranks in value["groups"].items()}
        return cls(value["version"], tuple(value["addresses"]), groups)


def agree_on_world(world: World, groups: Mapping[str, tuple[int, ...]], timeout_seconds: float) -> None:
    """Returns when all ranks have the same version, world and groups.

    Raises:
        AgreementError: they differ; says in what.
        RankLostError: a rank does not answer within the timeout.
    """
    own = Statement(hccl_fusion.__version__, world.addresses, groups)
    with collective_failures(world, "while the ranks compared their worlds", timeout_seconds):
        texts = tf_server.gather_text(own.to_json(), world.rank, world.size, tf_server.TALK_GROUP_KEY, timeout_seconds)
    statements = [Statement.from_json(text) for text in texts]
    _raise_differences(differences(statements))
    check_key_clashes(name for statement in statements for name in statement.groups)


def agree_on_group(world: World, group: str, ranks: tuple[int, ...], timeout_seconds: float) -> None:
    """Returns when all members of a new group have defined it alike.

    Raises:
        AgreementError: they differ.
        RankLostError: a member does not answer within the timeout.
    """
    if len(ranks) == 1:
        return
    text = json.dumps([world.rank, list(ranks)])
    with collective_failures(world, f"while ranks {list(ranks)} created the group {group!r}", timeout_seconds):
        texts = tf_server.gather_text(text, world.rank, len(ranks), group_keys([group])[group], timeout_seconds)
    definitions = dict(json.loads(text) for text in texts)
    _raise_differences(_group_differences(group, {rank: tuple(found) for rank, found in definitions.items()}))


def differences(statements: Sequence[Statement]) -> list[str]:
    """What the ranks differ in, the statement of rank r at position r; empty where they agree."""
    first = statements[0]
    findings = []
    for rank, other in enumerate(statements):
        if other.version != first.version:
            findings.append(f"hccl_fusion is {first.version} on rank 0 and {other.version} on rank {rank}")
        if other.addresses != first.addresses:
            findings.append(_address_difference(rank, first.addresses, other.addresses))
    for group in sorted({name for statement in statements for name in statement.groups}):
        defined = {rank: one.groups[group] for rank, one in enumerate(statements) if group in one.groups}
        members = {member for ranks in defined.values() for member in ranks if member < len(statements)}
        findings += _group_differences(group, {rank: defined.get(rank) for rank in {*members, *defined}})
    return findings


def _address_difference(rank: int, first: Sequence[str], other: Sequence[str]) -> str:
    if len(first) != len(other):
        return f"the world has {len(first)} ranks on rank 0 and {len(other)} on rank {rank}"
    of, here, there = next((at, *pair) for at, pair in enumerate(zip(first, other)) if pair[0] != pair[1])
    return f"rank {of} is at {here} on rank 0 and at {there} on rank {rank}"


def _group_differences(group: str, definitions: Mapping[int, tuple[int, ...] | None]) -> list[str]:
    """Definitions by rank; None where a member has not created the group."""
    in_order = sorted(definitions.items())
    rank, first = in_order[0]
    return [
        f"group {group!r} {_defined(first)} on rank {rank} and {_defined(found)} on rank {other}"
        for other, found in in_order
        if found != first
    ]


def _defined(ranks: tuple[int, ...] | None) -> str:
    return "was not created" if ranks is None else f"has ranks {list(ranks)}"


def _raise_differences(findings: list[str]) -> None:
    if findings:
        raise AgreementError(
            "the ranks do not agree",
            found=summarise(findings),
            expected="the same on all ranks",
            remedy="the same script, version and environment on all ranks",
        )


@contextmanager
def collective_failures(world: World, when: str, timeout_seconds: float | None = None) -> Iterator[None]:
    """Turns TensorFlow's errors of a collective into one that names the ranks that do not answer.

    Args:
        world: this rank's.
        when: what was being done, as part of the message.
        timeout_seconds: of the collective, for the message.

    Raises:
        AgreementError: another rank takes the group for larger or smaller.
        RankLostError: a rank has ended, does not answer, or did not come within the timeout.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        if "joining a group" in error.message:
            raise AgreementError(
                "the ranks do not agree",
                where=when,
                found=_sentence(error.message, "joining a group"),
                expected="the same world and groups on all ranks",
                remedy="the same script and environment on all ranks",
            ) from error
        if not _is_of_a_collective(error):
            raise
        lost = _lost_ranks(world, error)
        limit = "in time" if timeout_seconds is None else f"within {timeout_seconds:g} s"
        raise RankLostError(
            f"rank {world.rank} has lost another rank" if lost else f"rank {world.rank} waited for another rank",
            where=when,
            found=f"no answer from {lost}" if lost else f"that all ranks listen, but one did not come {limit}",
            expected="the same collectives on all ranks",
            remedy="the output of the other ranks; this process cannot go on with collectives",
        ) from error


def _lost_ranks(world: World, error: Exception) -> str:
    """Names the ranks that do not listen any more; a process that is being killed still does for a moment."""
    import tensorflow as tf

    has_gone = isinstance(error, tf.errors.UnavailableError)
    deadline = time.monotonic() + (_DYING_SECONDS if has_gone else 0)
    while True:
        lost = tf_server.unreachable_ranks(world)
        if lost or time.monotonic() >= deadline:
            return lost
        time.sleep(_POLL_SECONDS)


def _is_of_a_collective(error: Exception) -> bool:
    import tensorflow as tf

    kinds = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError)
    message = str(error)
    return isinstance(error, kinds) or "Collective" in message or "RecvBuf" in message


def _sentence(message: str, part: str) -> str:
    return next(line.strip() for line in message.splitlines() if part in line)
