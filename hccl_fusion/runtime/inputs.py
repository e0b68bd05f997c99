"""What a graph needs to run without its data: random inputs, initial values of variables, fixed seeds.

All is a function of names, ranks and one seed, so that two graphs with equal names get equal values.
"""

from __future__ import annotations

__all__ = ["fix_seeds", "initial_values", "random_feeds", "random_value"]

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from graph_passes.graph import Graph
from graph_passes.messages import GraphDef, NodeDef, dtype_name
from graph_passes.node_input import parse_input, producer_name
from hccl_fusion.errors import NumericCheckError
from hccl_fusion.runtime.dependences import Dependences, data_source_types
from hccl_fusion.runtime.graph_roles import Roles, find_roles
from hccl_fusion.runtime.in_process import InProcessRanks, tensor_name
from hccl_fusion.runtime.replicate import extract, rank_name

_UNKNOWN_SIZE = 2
_UNKNOWN_EXTENT = 32
"""Height or width of an image: below this, pooling leaves nothing of it."""
_FEED_IT = 'a value for it (--feeds FILE.npz, or feeds={"%s": …})'


def _digest(*parts: object) -> int:
    """A 64-bit number that depends on nothing but the parts."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def random_value(name: str, rank: int, seed: int, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """The value that tensor `name` gets on a rank.

    Floats and complex numbers are standard normal; integers are 0 or 1, so that they can be labels and ids. A scalar
    is more likely a rate than a datum: floats are then from [0.5, 1), and a bool, which may steer a branch with a
    reduction in it, is true on every rank.

    Args:
        name, rank, seed: what the value depends on.
        shape: known sizes.
        dtype: a numpy dtype, or one that numpy can cast to.
    """
    random = np.random.Generator(np.random.Philox(_digest("input", name, rank, seed)))
    kind, shape = np.dtype(dtype).kind, tuple(shape)
    if kind == "b":
        return np.asarray(random.integers(0, 2, shape) if shape else True).astype(dtype)
    if kind in "iu":
        return np.asarray(random.integers(0, 2, shape)).astype(dtype)
    values: Any = random.standard_normal(shape) if shape else random.uniform(0.5, 1.0)
    if kind == "c":
        values = values + 1j * random.standard_normal(shape)
    return np.asarray(values).astype(dtype)


def random_feeds(
    part: GraphDef, roots: Iterable[str], copies: Any, fed: Collection[str], seed: int
) -> Callable[[int], dict[str, np.ndarray]]:
    """Random values for all data sources that `roots` need and that are not fed, as a function of the rank.

    Unknown sizes become 2, in images (four dimensions or more) 32; an unknown batch size becomes that of the other
    sources, where they have one in common, else 2.

    Args:
        part: one rank's graph.
        roots: names of the nodes that will run.
        copies: the `tf.Graph` of all ranks, for types and shapes.
        fed: names of tensors (`name:0`) that the caller feeds.
        seed: of all values.

    Raises:
        NumericCheckError: a source cannot be given a random value.
    """
    depends = Dependences(part, {producer_name(name) for name in fed})
    tensors = {name: copies.get_tensor_by_name(rank_name(0, name)) for name in _open_sources(depends, roots, fed)}
    shapes = {name: _shape(depends.graph, name, tensor) for name, tensor in tensors.items()}
    batch = _common_batch(shapes.values())
    sizes = {name: _known(shape, batch) for name, shape in shapes.items()}

    def values_of(rank: int) -> dict[str, np.ndarray]:
        return {
            name: random_value(name, rank, seed, sizes[name], tensor.dtype.as_numpy_dtype)
            for name, tensor in tensors.items()
        }

    return values_of


def _open_sources(depends: Dependences, roots: Iterable[str], fed: Collection[str]) -> list[str]:
    """The tensors, `name:port`, through which data that nobody feeds comes to the roots."""
    graph = depends.graph
    needed = depends.needed(graph.ids[name] for name in roots if name in graph.ids)
    used = set(map(tensor_name, roots))
    for number in needed:
        if graph.names[number] not in depends.fed:
            used.update(tensor_name(text) for text in graph.node(number).input if not text.startswith("^"))
    sources = [
        f"{graph.names[number]}:{port}"
        for number in needed
        for port in range(len(data_source_types(graph.node(number))))
    ]
    return [name for name in sources if name in used and name not in fed]


def _shape(graph: Graph, name: str, tensor: Any) -> list[int | None]:
    """The shape of a source as far as it is known; an error where nothing can be made up for it."""
    node = name.rpartition(":")[0]
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_complex or tensor.dtype.is_bool):
        raise NumericCheckError(
            "an input cannot be made up", where=f"node {node}", found=tensor.dtype.name, expected="numbers",
            remedy=_FEED_IT % name,
        )  # fmt: skip
    shape = tensor.shape.as_list() if tensor.shape.rank is not None else _queue_shape(graph, name)
    if shape is None:
        raise NumericCheckError(
            "an input has no known rank", where=f"node {node}", found="an unknown shape", expected="a shape",
            remedy=_FEED_IT % name,
        )  # fmt: skip
    return shape


def _queue_shape(graph: Graph, name: str) -> list[int | None] | None:
    """The shape of what comes out of a queue, which only the queue itself tells."""
    import tensorflow as tf

    node, _, port = name.rpartition(":")
    dequeue = graph.node(graph.ids[node])
    producers = [graph.node(number) for number in graph.producers(graph.ids[node])]
    if not producers or len(producers[0].attr["shapes"].list.shape) <= int(port):
        return None
    shape: list[int | None] = tf.TensorShape(producers[0].attr["shapes"].list.shape[int(port)]).as_list()
    if dequeue.op in ("QueueDequeue", "QueueDequeueV2"):
        return shape
    counts_elements = producers[1].op == "Const" and "UpTo" not in dequeue.op
    return [int(tf.make_ndarray(producers[1].attr["value"].tensor)) if counts_elements else None, *shape]


def _common_batch(shapes: Iterable[Sequence[int | None]]) -> int:
    known = {shape[0] for shape in shapes if shape and shape[0]}
    return known.pop() or _UNKNOWN_SIZE if len(known) == 1 else _UNKNOWN_SIZE


def _known(shape: Sequence[int | None], batch: int) -> list[int]:
    inner = _UNKNOWN_EXTENT if len(shape) >= 4 else _UNKNOWN_SIZE
    sizes = [inner if size is None else size for size in shape]
    if shape and shape[0] is None:
        sizes[0] = batch
    return sizes


def fix_seeds(graph_def: GraphDef) -> GraphDef:
    """A copy in which every random op that asks for a random seed (0, 0) has one made of its name."""
    result = GraphDef()
    result.CopyFrom(graph_def)
    for nodes in (result.node, *(function.node_def for function in result.library.function)):
        for node in nodes:
            if "seed" in node.attr and "seed2" in node.attr and not (node.attr["seed"].i or node.attr["seed2"].i):
                node.attr["seed"].i = 1 + _digest("seed", node.name) % (2**31 - 1)
                node.attr["seed2"].i = 1 + _digest("seed2", node.name) % (2**31 - 1)
    return result


def initial_values(
    graph_def: GraphDef, variables: Iterable[str], *, roles: Roles | None = None, seed: int = 0
) -> dict[str, np.ndarray]:
    """Initial values of variables: the graph's own initialisers, evaluated once.

    A variable whose initialiser needs data, a checkpoint or a reduction gets small positive random numbers (a second
    moment must not be negative).

    Args:
        graph_def: one rank's graph.
        variables: names of the variables; others that their initialisers read are evaluated too.
        roles: the graph's roles, where they are known already.
        seed: of the random numbers.

    Raises:
        NumericCheckError: an initialiser fails, or a variable without one has no known shape.
    """
    initialisers = (roles or find_roles(graph_def)).initialisers
    pending = _with_prerequisites(variables, initialisers)
    tensors = {name: initialisers[name][0] for name in pending if name in initialisers}
    part = extract(fix_seeds(graph_def), [*pending, *(parse_input(text).name for text in tensors.values())])
    nodes = {node.name: node for node in part.node}
    values: dict[str, np.ndarray] = {}
    with InProcessRanks(part, 1) as ranks:
        while pending:
            ready = [name for name in pending if name in tensors and initialisers[name][1] <= values.keys()]
            if ready:
                found = ranks.run([tensors[name] for name in ready])[0]
                fresh = {name: found[tensors[name]] for name in ready}
            else:
                made_up = [name for name in pending if name not in tensors] or pending
                fresh = {name: _small_value(nodes[name], seed) for name in made_up}
            ranks.assign(fresh)
            values.update(fresh)
            pending = [name for name in pending if name not in values]
    return {name: values[name] for name in variables}


def _with_prerequisites(variables: Iterable[str], initialisers: Mapping[str, tuple[str, frozenset[str]]]) -> list[str]:
    """The variables and, transitively, those that their initial values read."""
    found = dict.fromkeys(variables)
    waiting = list(found)
    while waiting:
        _, reads = initialisers.get(waiting.pop(), ("", frozenset()))
        fresh = [name for name in sorted(reads) if name not in found]
        found.update(dict.fromkeys(fresh))
        waiting += fresh
    return list(found)


def _small_value(node: NodeDef, seed: int) -> np.ndarray:
    import tensorflow as tf

    dtype = tf.dtypes.as_dtype(node.attr["dtype"].type)
    shape = node.attr["shape"].shape
    if shape.unknown_rank or any(dim.size < 0 for dim in shape.dim):
        raise NumericCheckError(
            "a variable has neither an initialiser nor a shape", where=f"node {node.name}",
            expected="one of them", remedy="writing the graph with its initialisers",
        )  # fmt: skip
    if not dtype.is_numpy_compatible or dtype == tf.string:
        raise NumericCheckError(
            "a variable cannot be made up", where=f"node {node.name}", found=dtype_name(node.attr["dtype"].type),
            expected="numbers", remedy="writing the graph with its initialisers",
        )  # fmt: skip
    sizes = [dim.size for dim in shape.dim]
    if dtype.is_floating or dtype.is_complex:
        random = np.random.Generator(np.random.Philox(_digest("variable", node.name, seed)))
        return np.asarray(random.uniform(0.02, 0.12, sizes)).astype(dtype.as_numpy_dtype)
    return random_value(node.name, 0, seed, sizes, dtype.as_numpy_dtype)
