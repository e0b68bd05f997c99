"""Training-like graphs of any size, built from messages alone."""

from __future__ import annotations

__all__ = ["training_graph"]

from graph_passes.messages import GraphDef, NodeDef, types_pb2

_FLOAT, _INT32 = types_pb2.DT_FLOAT, types_pb2.DT_INT32
_LAYER_NODES = 16


class _Writer:
    """Appends the nodes of a layered network: forward, backward, all-reduce, division, update."""

    def __init__(self) -> None:
        self.graph = GraphDef()
        self.graph.versions.producer = 2000

    def add(self, name: str, op: str, *inputs: str, shape: tuple[int, ...] = (64, 256)) -> str:
        node: NodeDef = self.graph.node.add()
        node.name, node.op = name, op
        node.input.extend(inputs)
        node.attr["T"].type = _FLOAT
        node.attr["_class"].list.s.append(b"loc:@" + name.encode())
        sizes = node.attr["_output_shapes"].list.shape.add()
        for size in shape:
            sizes.dim.add().size = size
        return name

    def variable(self, name: str) -> str:
        node = self.graph.node.add()
        node.name, node.op = name, "VarHandleOp"
        node.attr["dtype"].type = _FLOAT
        node.attr["shared_name"].s = name.encode()
        for size in (256, 256):
            node.attr["shape"].shape.dim.add().size = size
        return name

    def layer_forward(self, layer: str, source: str, extra: int) -> str:
        weights = self.variable(f"{layer}/kernel")
        self.variable(f"{layer}/kernel/momentum")
        read = self.add(f"{layer}/kernel/read", "ReadVariableOp", weights, shape=(256, 256))
        output = self.add(f"{layer}/matmul", "MatMul", source, read)
        output = self.add(f"{layer}/relu", "Relu", output)
        for number in range(extra):
            other = self.add(f"{layer}/scale_{number}", "Mul", output, source)
            output = self.add(f"{layer}/shift_{number}", "AddV2", other, f"{layer}/relu", f"^{layer}/matmul")
        return output

    def layer_backward(self, layer: str, source: str, gradient: str, index: int) -> str:
        scope = f"gradients/{layer}"
        through = self.add(f"{scope}/relu_grad", "ReluGrad", gradient, f"{layer}/relu")
        weights = self.add(f"{scope}/matmul_1", "MatMul", source, through, shape=(256, 256))
        below = self.add(f"{scope}/matmul", "MatMul", through, f"{layer}/kernel/read")
        reduced = f"DistributedOptimizer_Allreduce/HcomAllReduce_{index}"
        self.add(reduced, "HcomAllReduce", weights, shape=(256, 256))
        node = self.graph.node[-1]
        node.attr["reduction"].s, node.attr["group"].s = b"sum", b"hccl_world_group"
        node.attr["fusion"].i, node.attr["fusion_id"].i = 1, -1
        self.add(f"DistributedOptimizer_Allreduce/truediv_{index}", "RealDiv", reduced, "ranks", shape=(256, 256))
        update = f"Momentum/update_{layer}/ResourceApplyMomentum"
        self.add(update, "ResourceApplyMomentum", f"{layer}/kernel", f"{layer}/kernel/momentum", "rate",
                 f"DistributedOptimizer_Allreduce/truediv_{index}", "rate")  # fmt: skip
        return below


def training_graph(nodes: int, gradients: int) -> GraphDef:
    """A graph of about `nodes` nodes, one dense layer a gradient, elementwise ops between to reach the size."""
    writer = _Writer()
    source = writer.add("images", "Placeholder")
    for name in ("ranks", "rate"):
        writer.add(name, "Placeholder", shape=())
    extra = max(0, (nodes // gradients - _LAYER_NODES + 4) // 2)
    sources = []
    for index in range(gradients):
        sources.append(source)
        source = writer.layer_forward(f"layer_{index}", source, extra)
    gradient = writer.add("gradients/loss", "Identity", source)
    for index in reversed(range(gradients)):
        gradient = writer.layer_backward(f"layer_{index}", sources[index], gradient, index)
    updates = [f"^Momentum/update_layer_{index}/ResourceApplyMomentum" for index in range(gradients)]
    writer.add("train", "NoOp", *updates)
    return writer.graph
