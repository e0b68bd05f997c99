"""Several ranks in one process: N copies of a graph in one session, with real collectives among them.

Each rank has a logical CPU device of its own. Grappler and TensorFlow's older graph optimisers are off, so that two
graphs that compute the same in a different arrangement are not told apart by an optimiser. Kernels are asked to run on
one thread; the thread pool belongs to the process, so a session that was opened earlier may have made it larger. Two
runs of one graph give the same bits either way.
"""

from __future__ import annotations

__all__ = ["InProcessRanks", "simulate_ranks", "tensor_name"]

import re
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Union

import numpy as np

from graph_passes.messages import GraphDef
from graph_passes.node_input import producer_name
from hccl_fusion.errors import NumericCheckError
from hccl_fusion.runtime.in_process_collectives import (
    COLLECTIVE_REDUCTIONS,
    pad_collectives,
    retarget_collectives,
)
from hccl_fusion.runtime.replicate import extract, rank_name, replicate
from hccl_fusion.runtime.state_access import add_state_access

Feeds = Union[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""Values by tensor name: one mapping for all ranks, or one a rank."""

_ROOT_NUMBER = re.compile(r"^\(\d+\) (?:[A-Z_]+: )?")


def tensor_name(text: str) -> str:
    """`name` -> `name:0`; a name with a port stays."""
    return text if ":" in text else f"{text}:0"


class InProcessRanks:
    """One session over the copies of a graph; a context manager.

        with InProcessRanks(graph_def, 2) as ranks:
            ranks.assign({"w": np.zeros(3, np.float32)})
            first, second = ranks.run(["loss"], {"x:0": x}, targets=["train"])

    Attributes:
        ranks: how many.
        variables: names of the variables of one rank's graph.
        graph: the `tf.Graph` of all copies.
    """

    def __init__(self, graph_def: GraphDef, ranks: int, *, timeout_seconds: float = 300.0) -> None:
        """Lowers the reductions, makes the copies and opens the session.

        Args:
            graph_def: one rank's graph; stays as it is.
            ranks: how many copies, at least 1.
            timeout_seconds: after which a run that does not come to its end is an error.

        Raises:
            NumericCheckError: TensorFlow cannot import the graph.
        """
        from graph_passes.lower import lower_reductions

        if ranks < 1:
            raise NumericCheckError("there are no ranks", found=ranks, expected="at least 1", remedy="-n 2")
        self.ranks = ranks
        self._timeout_seconds = timeout_seconds
        lowered = lower_reductions(graph_def, form="collective", ranks=ranks)
        lowered, self._state = add_state_access(retarget_collectives(lowered, ranks, timeout_seconds))
        self.variables = tuple(self._state)
        self.graph = _import_copies(lowered, ranks)
        unsafe = _may_be_empty(self.graph)
        if unsafe or _reduces_in_functions(lowered):
            self.graph = _import_copies(pad_collectives(lowered, unsafe), ranks)
        self._session: Any = None

    def __enter__(self) -> InProcessRanks:
        import tensorflow as tf

        self._session = tf.compat.v1.Session(graph=self.graph, config=_session_config(self.ranks))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.close()
        self._session = None

    def run(
        self, fetches: Iterable[str] = (), feeds: Feeds = (), targets: Iterable[str] = ()
    ) -> tuple[dict[str, np.ndarray], ...]:
        """One step on all ranks at once.

        Args:
            fetches: tensor names of one rank's graph, with or without `:0`.
            feeds: values by tensor name, for all ranks or one mapping a rank.
            targets: names of nodes to run as well.

        Returns:
            For each rank the fetched arrays, by the names as they were given.

        Raises:
            NumericCheckError: a name is unknown, a fed value does not fit, a kernel fails, or the ranks stall.
        """
        fetches, targets = list(fetches), list(targets)
        by_rank = self.rank_feeds(feeds)
        wanted = [self._tensor(rank, name) for rank in range(self.ranks) for name in fetches]
        wanted += [self._operation(rank, name) for rank in range(self.ranks) for name in targets]
        fed = {self._tensor(rank, name): value for rank, values in enumerate(by_rank) for name, value in values.items()}
        results = self._run(wanted, fed)
        count = len(fetches)
        return tuple(dict(zip(fetches, results[rank * count : (rank + 1) * count])) for rank in range(self.ranks))

    def assign(self, values: Feeds) -> None:
        """Sets variables, by name: the same values on all ranks, or one mapping a rank."""
        by_rank = self.rank_feeds(values)
        feeds = [{self._state[name].value: value for name, value in mapping.items()} for mapping in by_rank]
        self.run((), feeds, [self._state[name].assign for name in dict.fromkeys(n for m in by_rank for n in m)])

    def read(self, variables: Iterable[str]) -> tuple[dict[str, np.ndarray], ...]:
        """The values of variables, by name, on each rank."""
        names = list(variables)
        found = self.run([self._state[name].read for name in names])
        return tuple(dict(zip(names, values.values())) for values in found)

    def rank_feeds(self, feeds: Feeds) -> Sequence[Mapping[str, Any]]:
        """One mapping for each rank."""
        if isinstance(feeds, Mapping):
            return [feeds] * self.ranks
        if feeds and len(feeds) != self.ranks:
            raise NumericCheckError(
                "the feeds do not fit the ranks", found=f"{len(feeds)} mappings",
                expected=f"one for all or {self.ranks}", remedy="one mapping for each rank",
            )  # fmt: skip
        return feeds

    def _tensor(self, rank: int, name: str) -> Any:
        try:
            return self.graph.get_tensor_by_name(tensor_name(rank_name(rank, name)))
        except (KeyError, ValueError) as error:
            raise self._unknown("tensor", name) from error

    def _operation(self, rank: int, name: str) -> Any:
        try:
            return self.graph.get_operation_by_name(rank_name(rank, name))
        except (KeyError, ValueError) as error:
            raise self._unknown("node", name) from error

    def _unknown(self, kind: str, name: str) -> NumericCheckError:
        return NumericCheckError(
            f"the graph has no such {kind}", found=repr(name), expected=f"the name of a {kind} of the graph",
            remedy="hccl-fusion list",
        )  # fmt: skip

    def _run(self, wanted: list[Any], fed: Mapping[Any, Any]) -> list[Any]:
        import tensorflow as tf

        if self._session is None:
            raise NumericCheckError("the ranks are not running", remedy="with InProcessRanks(…) as ranks")
        if not wanted:
            return []
        options = tf.compat.v1.RunOptions(timeout_in_ms=int(self._timeout_seconds * 1000))
        # Without a key of its own a session has no collectives inside functions that a call op names by attribute.
        options.experimental.collective_graph_key = 1
        try:
            results: list[Any] = self._session.run(wanted, fed, options=options)
        except tf.errors.DeadlineExceededError as error:
            raise NumericCheckError(
                f"the ranks stalled for {self._timeout_seconds:g} s", where=_failed_node(error),
                found=_first_line(error), expected="every rank to reach every reduction",
                remedy="a longer timeout_seconds, or look for a reduction that only some ranks run",
            ) from error  # fmt: skip
        except tf.errors.OpError as error:
            raise NumericCheckError(
                "the graph fails when it is run", where=_failed_node(error), found=_first_line(error),
                remedy="feeding real data (--feeds, feeds=…)",
            ) from error  # fmt: skip
        except (TypeError, ValueError) as error:
            raise NumericCheckError("a value cannot be fed or fetched", found=_first_line(error)) from error
        return results


def _import_copies(lowered: GraphDef, ranks: int) -> Any:
    import tensorflow as tf

    graph = tf.Graph()
    try:
        with graph.as_default():
            tf.import_graph_def(replicate(lowered, ranks), name="")
    except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
        raise NumericCheckError(
            "TensorFlow cannot import the graph", found=_first_line(error), expected="a graph of TensorFlow's own ops",
            remedy="leaving out what is neither training nor reduction",
        ) from error  # fmt: skip
    return graph


def _may_be_empty(graph: Any) -> set[str]:
    """Names, in one rank's graph, of the reductions whose input has no elements or is of unknown shape."""
    first = rank_name(0, "")
    unsafe = set()
    for operation in graph.get_operations():
        if operation.type in COLLECTIVE_REDUCTIONS and operation.name.startswith(first):
            shape = operation.inputs[0].shape
            if not shape.is_fully_defined() or shape.num_elements() == 0:
                unsafe.add(operation.name[len(first) :])
    return unsafe


def _reduces_in_functions(graph_def: GraphDef) -> bool:
    return any(
        node.op in COLLECTIVE_REDUCTIONS for function in graph_def.library.function for node in function.node_def
    )


def _session_config(ranks: int) -> Any:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": ranks, "GPU": 0},
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=max(2, ranks),
        use_per_session_threads=True,
        allow_soft_placement=False,
    )
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = tf.compat.v1.OptimizerOptions.L0
    return config


def _first_line(error: BaseException) -> str:
    """The heart of TensorFlow's message; session errors wrap it into a page of where the node was made."""
    inner = error.__context__ if type(error.__context__) is type(error) else error
    lines = str(getattr(inner, "message", inner)).strip().splitlines()
    told = [line.strip() for line in lines if line.strip() and not line.rstrip().endswith("root error(s) found.")]
    return _ROOT_NUMBER.sub("", told[0])[:300] if told else type(error).__name__


def _failed_node(error: Any) -> str:
    operation = getattr(error, "op", None)
    return f"node {operation.name}" if operation is not None else ""


def simulate_ranks(
    graph_def: GraphDef, n: int, feeds: Feeds, fetches: Sequence[str], *, targets: Sequence[str] = ()
) -> tuple[dict[str, np.ndarray], ...]:
    """Runs one step of `n` copies of a rank's graph, with real reductions among them.

    Variables start from the graph's own initialisers, evaluated once and given to every rank.

    Args:
        graph_def: one rank's graph, with HcomAllReduce nodes or with collectives of any group size.
        n: how many ranks.
        feeds: values by tensor name, one mapping for all ranks or one a rank.
        fetches: tensor names, with or without `:0`.
        targets: names of nodes to run as well.

    Returns:
        For each rank the fetched arrays by name.

    Raises:
        NumericCheckError: the graph cannot be imported or run, or the ranks stall.
    """
    from hccl_fusion.runtime.inputs import initial_values

    needed = [producer_name(name) for name in (*fetches, *targets)]
    part = extract(graph_def, needed)
    with InProcessRanks(part, n) as ranks:
        ranks.assign(initial_values(graph_def, ranks.variables))
        return ranks.run(fetches, feeds, targets)
