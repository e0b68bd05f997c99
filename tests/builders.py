"""Small graphs for the tests: one call a node, attributes by plain Python values."""

from __future__ import annotations

import argparse
import io
import random
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format

from graph_passes.find import Find
from graph_passes.graph import Graph, graphs_of
from graph_passes.index import Index
from graph_passes.messages import AttrValue, FunctionDef, GraphDef, MetaGraphDef, NodeDef, SavedModel, types_pb2
from graph_passes.pipeline import GraphItem, Pipeline
from graph_passes.sections import Gradient
from hccl_fusion.strategy import Strategy, StrategyKind

WORLD = "hccl_world_group"
FLOAT, DOUBLE, HALF = types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_HALF
INT32, INT64, BOOL = types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_BOOL
STRING, RESOURCE = types_pb2.DT_STRING, types_pb2.DT_RESOURCE
_NUMPY = {FLOAT: np.float32, DOUBLE: np.float64, HALF: np.float16, INT32: np.int32, INT64: np.int64}


class Type(int):
    """A DataType number, to tell a type attribute from an int."""


class Shape(tuple):
    """A shape attribute; -1 is an unknown dimension."""


class Shapes(tuple):
    """A list of shapes; None is an unknown rank."""


def attr_value(value: Any) -> AttrValue:
    """The AttrValue of a Python value."""
    if isinstance(value, AttrValue):
        return value
    attr = AttrValue()
    for kind, fill in _FILL:
        if isinstance(value, kind):
            fill(attr, value)
            return attr
    raise TypeError(f"no attribute for {value!r}")


def _set_shapes(attr: AttrValue, value: Shapes) -> None:
    attr.list.SetInParent()
    for shape in value:
        _set_shape(attr.list.shape.add(), shape)


def _set_list(attr: AttrValue, value: list[Any]) -> None:
    attr.list.SetInParent()
    field = {bytes: attr.list.s, Type: attr.list.type}.get(type(value[0]) if value else int, attr.list.i)
    field.extend(value)


def _set_shape(proto: Any, shape: Iterable[int] | None) -> None:
    proto.SetInParent()
    if shape is None:
        proto.unknown_rank = True
        return
    for size in shape:
        proto.dim.add().size = size


def _set_tensor(attr: AttrValue, value: np.ndarray) -> None:
    tensor = attr.tensor
    tensor.dtype = next(dtype for dtype, kind in _NUMPY.items() if value.dtype == kind)
    _set_shape(tensor.tensor_shape, value.shape)
    tensor.tensor_content = value.tobytes()


# In this order: a Type is an int, and so is a bool.
_FILL: tuple[tuple[type, Callable[[AttrValue, Any], Any]], ...] = (
    (Type, lambda attr, value: setattr(attr, "type", value)),
    (bool, lambda attr, value: setattr(attr, "b", value)),
    (int, lambda attr, value: setattr(attr, "i", value)),
    (float, lambda attr, value: setattr(attr, "f", value)),
    (str, lambda attr, value: setattr(attr, "s", value.encode("utf-8"))),
    (bytes, lambda attr, value: setattr(attr, "s", value)),
    (Shape, lambda attr, value: _set_shape(attr.shape, value)),
    (Shapes, _set_shapes),
    (np.ndarray, _set_tensor),
    (list, _set_list),
)


class Nodes:
    """Adds nodes to a GraphDef, or to a function's body; every method returns the name to read the output by."""

    def __init__(self, container: Any = None) -> None:
        self.graph_def = GraphDef()
        self.graph_def.versions.producer = 1882
        self.container = self.graph_def.node if container is None else container

    def add(self, name: str, op: str, *inputs: str, device: str = "", **attrs: Any) -> str:
        """One node; attribute `T=FLOAT` must be given as `T=Type(FLOAT)`."""
        node = self.container.add()
        node.name, node.op, node.device = name, op, device
        node.input.extend(inputs)
        for key, value in attrs.items():
            node.attr[key].CopyFrom(attr_value(value))
        return name

    def placeholder(self, name: str, shape: Sequence[int], dtype: int = FLOAT, **attrs: Any) -> str:
        return self.add(name, "Placeholder", dtype=Type(dtype), shape=Shape(shape), **attrs)

    def constant(self, name: str, value: Any, dtype: int = FLOAT, *controls: str, **attrs: Any) -> str:
        tensor = np.asarray(value, _NUMPY[dtype])
        return self.add(name, "Const", *controls, dtype=Type(dtype), value=tensor, **attrs)

    def identity(self, name: str, source: str, *controls: str, dtype: int = FLOAT, **attrs: Any) -> str:
        return self.add(name, "Identity", source, *controls, T=Type(dtype), **attrs)

    def add_n(self, name: str, *sources: str, dtype: int = FLOAT, **attrs: Any) -> str:
        count = sum(not source.startswith("^") for source in sources)
        return self.add(name, "AddN", *sources, N=count, T=Type(dtype), **attrs)

    def all_reduce(self, name: str, tensor: str, *controls: str, dtype: int = FLOAT, **attrs: Any) -> str:
        """An HcomAllReduce as an NPU optimizer wrapper writes it; an attribute given as None is left out."""
        full = {"T": Type(dtype), "reduction": "sum", "group": WORLD, "fusion": 1, "fusion_id": -1, **attrs}
        return self.add(
            name, "HcomAllReduce", tensor, *controls, **{key: v for key, v in full.items() if v is not None}
        )

    def gradient(self, name: str, shape: Sequence[int], dtype: int = FLOAT, **attrs: Any) -> str:
        """Placeholder `name/g`, all-reduce `name`, and Identity `name/out` that reads it."""
        device = attrs.get("device", "")
        self.placeholder(f"{name}/g", shape, dtype, device=device)
        self.all_reduce(name, f"{name}/g", dtype=dtype, **attrs)
        return self.identity(f"{name}/out", name, dtype=dtype, device=device)

    def function(self, name: str, args: dict[str, int], outputs: dict[str, tuple[int, str]]) -> Nodes:
        """A function of the library: `outputs` says, by name, the type and the tensor of the body."""
        function = self.graph_def.library.function.add()
        function.signature.name = name
        for arg, dtype in args.items():
            function.signature.input_arg.add(name=arg, type=dtype)
        for output, (dtype, tensor) in outputs.items():
            function.signature.output_arg.add(name=output, type=dtype)
            function.ret[output] = tensor
        body = Nodes(function.node_def)
        body.graph_def = self.graph_def
        return body


def gradients_graph(*shapes: Sequence[int], dtype: int = FLOAT) -> GraphDef:
    """Independent gradients ar_0, ar_1, … of the given shapes."""
    nodes = Nodes()
    for number, shape in enumerate(shapes):
        nodes.gradient(f"ar_{number}", shape, dtype)
    return nodes.graph_def


def node_of(graph_def: GraphDef | FunctionDef, name: str) -> NodeDef:
    """The node of that name, writable."""
    container = graph_def.node if isinstance(graph_def, GraphDef) else graph_def.node_def
    return next(node for node in container if node.name == name)


def indexed(graph_def: GraphDef, **lists: tuple[str, ...]) -> GraphItem:
    """The item after find and index."""
    return Pipeline((Find(), Index())).run(GraphItem(graph_def, **lists)).item


def gradients_of(graph_def: GraphDef) -> dict[str, Gradient]:
    """What find sees, by name."""
    return {gradient.name: gradient for gradient in Find().run(GraphItem(graph_def)).item.gradients or ()}


def random_graph(
    seed: int, size: int, *, reductions: float = 0.3, roots: float = 0.2, control: float = 0.2
) -> GraphDef:
    """A random acyclic graph in a random node order, with all-reduces, data-like roots and control edges."""
    rng = random.Random(seed)
    plain = [f"{rng.choice('abz')}_{number}" for number in range(size)]
    nodes: list[NodeDef] = []
    for number, name in enumerate(plain):
        node = NodeDef(name=name)
        earlier = plain[:number]
        if not earlier or rng.random() < roots:
            node.op = rng.choice(["Const", "Placeholder", "IteratorGetNext", "VariableV2", "_Recv"])
        else:
            is_reduction = rng.random() < reductions
            node.op = "HcomAllReduce" if is_reduction else "AddN"
            count = 1 if is_reduction else rng.randint(1, 3)
            node.input.extend(rng.choice(earlier) for _ in range(count))
        for source in earlier[-8:]:
            if rng.random() < control / 4:
                node.input.append(f"^{source}")
        nodes.append(node)
    rng.shuffle(nodes)
    return GraphDef(node=nodes)


def index_of(graph_def: GraphDef) -> Graph:
    """The index of the graph itself."""
    return graphs_of(graph_def)[0]


# ------------------------------------------------------------------------------------ files


def small_graph() -> GraphDef:
    """Two gradients and a function."""
    graph_def = gradients_graph((2, 3), (4,))
    nodes = Nodes()
    nodes.graph_def = graph_def
    nodes.function("f", {"x": FLOAT}, {"y": (FLOAT, "i:output:0")}).identity("i", "x")
    return graph_def


def meta_graph(*tags: str) -> MetaGraphDef:
    """A small graph with all that a Saver writes beside it."""
    meta = MetaGraphDef(graph_def=small_graph())
    meta.meta_info_def.meta_graph_version = "v1"
    meta.meta_info_def.stripped_op_list.op.add(name="Identity")
    meta.meta_info_def.tags.extend(tags)
    meta.saver_def.filename_tensor_name = "save/Const:0"
    meta.collection_def["train_op"].node_list.value.append("train")
    meta.collection_def["variables"].bytes_list.value.append(b"\x00\xffgraph_def {")
    meta.signature_def["serving_default"].inputs["x"].name = "node { }"
    return meta


def saved_model() -> SavedModel:
    """A model of two graphs, of which the second is for training."""
    return SavedModel(saved_model_schema_version=1, meta_graphs=[meta_graph("serve"), meta_graph("train", "gpu")])


class Streams:
    """stdin and stdout of bytes, as a pipe has them."""

    def __init__(self, content: bytes = b"") -> None:
        self.buffer = io.BytesIO(content)


# ------------------------------------------------------------------------------------ golden graphs

GRAPHS = Path(__file__).parent / "data" / "graphs"


@dataclass(frozen=True)
class Case:
    """One folder of tests/data/graphs: `input.pbtxt`, and the expected graph of each form beside it.

    The second line of the input holds the flags of `hccl-fusion fuse` that the case is fused with.
    """

    name: str
    graph_def: GraphDef
    options: dict[str, Any]

    @property
    def folder(self) -> Path:
        return GRAPHS / self.name


def golden_cases() -> list[Case]:
    """All cases, by name."""
    return [_read_case(path.parent) for path in sorted(GRAPHS.glob("*/input.pbtxt"))]


def _read_case(folder: Path) -> Case:
    text = (folder / "input.pbtxt").read_text(encoding="utf-8")
    flags = text.splitlines()[1]
    assert flags.startswith("# flags:"), f"{folder}: the second line tells the flags"
    given = vars(_case_flags().parse_args(shlex.split(flags[len("# flags:") :])))
    strategies = [given.pop(name) for name in ("idx", "segments", "single")]
    strategy = next(found for found in strategies if found is not None)
    return Case(folder.name, text_format.Parse(text, GraphDef()), {"strategy": strategy, **given})


def _case_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idx", type=Strategy.parse_idx)
    parser.add_argument("--segments", type=lambda text: Strategy(StrategyKind.SEGMENTS, (int(text),)))
    parser.add_argument("--single", action="store_const", const=Strategy(StrategyKind.SINGLE))
    parser.add_argument("--group", default=WORLD)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--no-chain", dest="chain", action="store_false")
    parser.add_argument("--keep", action="append", default=[])
    parser.add_argument("--fetch", action="append", default=[])
    return parser


def one_node_a_line(graph_def: GraphDef) -> str:
    """The graph as text, with one line for each node: what golden files hold, and what differences are shown in."""
    lines = [_block("node", node) for node in graph_def.node]
    for function in graph_def.library.function:
        head = FunctionDef()
        head.CopyFrom(function)
        del head.node_def[:]
        lines += ["library { function {", f"  {_one_line(head)}"]
        lines += ["  " + _block("node_def", node) for node in function.node_def]
        lines.append("} }")
    lines.append(_block("versions", graph_def.versions))
    return "\n".join(lines) + "\n"


def _block(field: str, message: Any) -> str:
    return f"{field} {{ {_one_line(message)} }}"


def _one_line(message: Any) -> str:
    return text_format.MessageToString(message, as_one_line=True).strip()
