"""Pass fuse: writes one all-reduce for each part of the plan.

Rules:

1. The node that was a member's all-reduce keeps its name and becomes the Reshape (or Identity) that yields the reduced
   gradient. So consumers, fetches, colocation and summaries need no change.
2. New nodes are named `<scope of the first member>/fused_<segment>/…`.
3. The reductions of a chain follow one another by control edges.
4. Control inputs of the members go to the fused reduction; control consumers keep pointing at the members' names.
5. A part of one gradient gets no concat: it becomes `fusion` 0 and takes its place in the chain.
6. Device, group, reduction and type are equal in all members of a part; nothing is taken from the first member only.
"""

from __future__ import annotations

__all__ = ["Fuse"]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from graph_passes.builder import fresh_scope, scope_of
from graph_passes.edit import EditWriter
from graph_passes.errors import PassError
from graph_passes.messages import NodeDef, types_pb2
from graph_passes.op_tables import ALL_REDUCE_OP
from graph_passes.pipeline import GraphItem, PassResult, require
from graph_passes.rewrite import replace_node
from graph_passes.sections import Gradient, GradientId, Part

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Fuse:
    """Rewrites the graph.

    Attributes:
        chain: order the reductions of a chain by control edges.
    """

    chain: bool = True
    name: ClassVar[str] = "fuse"

    def requires(self, item: GraphItem) -> None:
        """A plan is there."""
        require(item.parts is not None, self.name, "there is no plan", "planning before it")

    def run(self, item: GraphItem) -> PassResult:
        """Returns the fused graph; without a part to write, the very graph that came in."""
        if not item.parts:
            return PassResult(item, notes=("nothing to fuse",))
        gradients = {gradient.id: gradient for gradient in item.gradients or ()}
        writers = item.writers({part.key.graph for part in item.parts})
        for label, writer in writers.items():
            _fuse_graph(writer, [part for part in item.parts if part.key.graph == label], gradients, self.chain)
        fused = sum(len(part.gradients) > 1 for part in item.parts)
        return PassResult(item.edited(writers), True, (f"{fused} fused all-reduces",))

    def ensures(self, item: GraphItem) -> None:
        """Pass verify checks the result."""


def _fuse_graph(writer: EditWriter, parts: Sequence[Part], gradients: dict[GradientId, Gradient], chain: bool) -> None:
    last_of_chain: dict[int, str] = {}
    for part in parts:
        members = [gradients[name] for name in part.gradients]
        _require_equal(members)
        reduction = _fuse_part(writer, part, members) if len(members) > 1 else _single(writer, members[0])
        before = last_of_chain.get(part.chain)
        if chain and part.chain >= 0:
            if before is not None and f"^{before}" not in reduction.input:
                reduction.input.append(f"^{before}")
            last_of_chain[part.chain] = reduction.name


def _require_equal(members: Sequence[Gradient]) -> None:
    """Rule 6.

    Raises:
        PassError: the plan puts gradients together that cannot be one reduction.
    """
    first = members[0]
    for member in members:
        if (member.key, member.device, member.frame) != (first.key, first.device, first.frame):
            raise PassError(
                "a part of the plan mixes gradients that cannot be fused",
                where=f"node {member.name}",
                found=f"{member.key} on {member.device or 'no device'}",
                expected=f"{first.key} on {first.device or 'no device'} as {first.name}",
                remedy="a new plan",
            )


def _single(writer: EditWriter, gradient: Gradient) -> NodeDef:
    """Rule 5: fusion 0, so that no later fusion takes it up again."""
    node = writer.node(gradient.node)
    if (gradient.fusion, gradient.fusion_id) != (0, -1):
        node.attr["fusion"].i, node.attr["fusion_id"].i = 0, -1
    return node


def _fuse_part(writer: EditWriter, part: Part, members: Sequence[Gradient]) -> NodeDef:
    builder = writer.builder
    device = writer.current(members[0].node).device
    scope = _scope(writer, part, members)
    concat = _concat(writer, scope, members, device)
    controls = dict.fromkeys(
        text for member in members for text in writer.current(member.node).input if text.startswith("^")
    )
    reduction = builder.add(
        f"{scope}/all_reduce",
        ALL_REDUCE_OP,
        [concat, *controls],
        device,
        types={"T": part.key.dtype},
        ints={"fusion": 0, "fusion_id": -1},
        strings={"reduction": part.key.reduction, "group": part.key.group},
    )
    # So that the graph tells its own shapes when it is read again.
    sizes = reduction.attr["_output_shapes"].list.shape.add()
    sizes.dim.add().size = sum(member.elements or 0 for member in members)
    split = _split(writer, scope, members, device)
    shape_names: dict[tuple[int, ...], str] = {}
    for index, member in enumerate(members):
        _restore(writer, member, builder.ref(split, "output", index), f"{scope}/shape_{index}", shape_names)
    return reduction


def _scope(writer: EditWriter, part: Part, members: Sequence[Gradient]) -> str:
    outer = scope_of(members[0].name)
    wanted = f"{outer}/fused_{part.segment}" if outer else f"fused_{part.segment}"
    numbered = [f"{kind}_{index}" for kind in ("flat", "shape") for index in range(len(members))]
    fixed = ["flat_shape", "axis", "concat", "all_reduce", "split_sizes", "split_axis", "split"]
    return fresh_scope(wanted, fixed + numbered, writer.builder.taken)


def _concat(writer: EditWriter, scope: str, members: Sequence[Gradient], device: str) -> str:
    """Flattens the members and joins them; returns the reference to the joined tensor."""
    builder, dtype = writer.builder, members[0].dtype
    flat_shape = ""
    pieces = []
    for index, member in enumerate(members):
        piece = writer.current(member.node).input[0]
        if member.shape is not None and len(member.shape) != 1:
            flat_shape = flat_shape or builder.constant(f"{scope}/flat_shape", [-1], types_pb2.DT_INT32, device)
            name = f"{scope}/flat_{index}"
            builder.add(name, "Reshape", [piece, flat_shape], device,
                        types={"T": dtype, "Tshape": types_pb2.DT_INT32})  # fmt: skip
            piece = builder.ref(name, "output")
        pieces.append(piece)
    axis = builder.constant(f"{scope}/axis", 0, types_pb2.DT_INT32, device)
    builder.add(f"{scope}/concat", "ConcatV2", [*pieces, axis], device,
                types={"T": dtype, "Tidx": types_pb2.DT_INT32}, ints={"N": len(members)})  # fmt: skip
    return builder.ref(f"{scope}/concat", "output")


def _split(writer: EditWriter, scope: str, members: Sequence[Gradient], device: str) -> str:
    """Cuts the reduced tensor; returns the splitting node's name."""
    builder = writer.builder
    sizes = [member.elements or 0 for member in members]
    size_type = types_pb2.DT_INT32 if sum(sizes) <= _INT32_MAX else types_pb2.DT_INT64
    sizes_ref = builder.constant(f"{scope}/split_sizes", sizes, size_type, device)
    axis_ref = builder.constant(f"{scope}/split_axis", 0, types_pb2.DT_INT32, device)
    reduced = builder.ref(f"{scope}/all_reduce", "output")
    builder.add(f"{scope}/split", "SplitV", [reduced, sizes_ref, axis_ref], device,
                types={"T": members[0].dtype, "Tlen": size_type}, ints={"num_split": len(members)})  # fmt: skip
    return f"{scope}/split"


def _restore(
    writer: EditWriter, member: Gradient, piece: str, shape_name: str, shape_names: dict[tuple[int, ...], str]
) -> None:
    """Rule 1: the member's node now yields its piece of the reduced tensor in its own shape."""
    node = writer.node(member.node)
    shape = member.shape or ()
    if len(shape) == 1:
        replace_node(node, "Identity", [piece], {"T": member.dtype})
        return
    shape_type = types_pb2.DT_INT32 if max(shape, default=0) <= _INT32_MAX else types_pb2.DT_INT64
    if shape not in shape_names:
        # An empty list needs its type said: a scalar's shape is a vector of no elements.
        shape_names[shape] = writer.builder.constant(shape_name, list(shape), shape_type, node.device)
    replace_node(node, "Reshape", [piece, shape_names[shape]], {"T": member.dtype, "Tshape": shape_type})
