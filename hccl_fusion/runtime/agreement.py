"""Ranks compare what they are about to reduce before they do it.

A rank that would reduce other tensors, in another order or in other segments, would hang the others or spoil their
weights. So each rank states its plan while the reduction is being built; a difference is the same error on all ranks.
"""

from __future__ import annotations

__all__ = ["PlanStatement", "StatedTensor", "agree_on_plan", "outside_autograph", "plan_difference"]

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar, cast

from graph_passes.lower import group_keys
from hccl_fusion.errors import HcclFusionError
from hccl_fusion.registry import DEFAULT_GROUP
from hccl_fusion.runtime import collective_keys, group_registry, handshake, tf_server

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class StatedTensor:
    """One tensor as a rank is about to reduce it.

    Attributes:
        name: its variable's name where that is known.
        shape: as text, `[3, 4]`, or `unknown`.
        dtype: name of its type.
        segment: label of the bucket that it is in, and how it is reduced.
    """

    name: str
    shape: str
    dtype: str
    segment: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {self.shape} in {self.segment}"


@dataclass(frozen=True)
class PlanStatement:
    """What one rank is about to reduce.

    Attributes:
        rank: of the world.
        what: what reduces it, such as a wrapper's scope.
        options: of the wrapper, as text.
        tensors: in index order.
        keys: first instance key and number of keys.
    """

    rank: int
    what: str
    options: str
    tensors: tuple[StatedTensor, ...]
    keys: tuple[int, int] = (0, 0)

    @property
    def fingerprint(self) -> str:
        """A hash of all but the rank and the keys."""
        return _hash(replace(self, rank=0, keys=(0, 0)).to_json())

    @property
    def digest(self) -> str:
        """A hash of all but the rank: equal on ranks that agree."""
        return _hash(replace(self, rank=0).to_json())

    def to_json(self) -> str:
        """One line; equal statements give equal text."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> PlanStatement:
        """Reads what `to_json` has written."""
        value = json.loads(text)
        tensors = tuple(StatedTensor(**tensor) for tensor in value["tensors"])
        first, count = value["keys"]
        return cls(value["rank"], value["what"], value["options"], tensors, (first, count))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def agree_on_plan(statement: PlanStatement, group: str, timeout_seconds: float) -> None:
    """Returns when all ranks of the group have made equal statements.

    Runs at once, also while a graph is being built or a function is being traced.

    Raises:
        AgreementError: they differ; says in what first.
        RankLostError: a rank does not answer within the timeout.
    """
    import tensorflow as tf

    world = group_registry.current_world("agree_on_plan")
    ranks = group_registry.group_ranks(group, "agree_on_plan")
    key = tf_server.TALK_GROUP_KEY if group == DEFAULT_GROUP else group_keys([group])[group]
    when = f"while the ranks compared what {statement.what} reduces"

    def gather(text: str) -> list[str]:
        return tf_server.gather_text(text, world.rank, len(ranks), key, timeout_seconds)

    with handshake.collective_failures(world, when, timeout_seconds), tf.init_scope():
        if len(set(gather(statement.digest))) == 1:
            return
        statements = [PlanStatement.from_json(text) for text in gather(statement.to_json())]
    collective_keys.skip_keys(group, max(sum(one.keys) for one in statements))
    raise handshake.AgreementError(
        "the ranks do not agree on what they reduce",
        where=statement.what,
        found=plan_difference(sorted(statements, key=lambda one: one.rank)),
        expected="the same gradients in the same segments on all ranks",
        remedy="the same model, optimizer and split strategy on all ranks",
    )


def plan_difference(statements: Sequence[PlanStatement]) -> str:
    """The first thing in which a statement differs from the first one; "" where all agree."""
    first = statements[0]
    for other in statements[1:]:
        found = _difference(first, other)
        if found:
            return found
    return ""


def _difference(first: PlanStatement, other: PlanStatement) -> str:
    here, there = f"on rank {first.rank}", f"on rank {other.rank}"
    for at in range(max(len(first.tensors), len(other.tensors))):
        pair = [one.tensors[at] if at < len(one.tensors) else None for one in (first, other)]
        if pair[0] != pair[1]:
            texts = ["none" if tensor is None else str(tensor) for tensor in pair]
            return f"gradient {at} is {texts[0]} {here} and {texts[1]} {there}"
    for name in ("options", "what", "keys"):
        values = getattr(first, name), getattr(other, name)
        if values[0] != values[1]:
            return f"{name}: {values[0]} {here} and {values[1]} {there}"
    return ""


def outside_autograph(function: _Function) -> _Function:
    """Keeps AutoGraph from rewriting a function that user code calls inside tf.function.

    AutoGraph rewrites whatever such code calls, this library too, and gives errors another type on their way out.
    """

    def passing(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except HcclFusionError as error:
            error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph's own mark
            raise

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        return tf.autograph.experimental.do_not_convert(passing)(*args, **kwargs)

    return cast(_Function, wrapper)
