"""Prints the nodes in which a rewritten graph differs from its original, one node a line.

python docs/show_changes.py before.pbtxt after.pbtxt
"""

from __future__ import annotations

import sys

import numpy as np

from graph_passes.files import read_graph
from graph_passes.messages import NodeDef, dtype_name


def describe(node: NodeDef) -> str:
    """`name = Op(inputs) attribute=value`; of the attributes only numbers and strings, of a constant its values."""
    text = f"{node.name} = {node.op}({', '.join(node.input)})"
    if node.op == "Const":
        tensor = node.attr["value"].tensor
        shape = [dim.size for dim in tensor.tensor_shape.dim]
        values = np.frombuffer(tensor.tensor_content, dtype_name(tensor.dtype)).reshape(shape)
        return f"{text} {values.tolist()}"
    for name, value in sorted(node.attr.items()):
        kind = value.WhichOneof("value")
        if kind in ("i", "f"):
            text += f" {name}={getattr(value, kind):g}"
        elif kind == "s":
            text += f" {name}={value.s.decode()}"
    return text


def main(before: str, after: str) -> None:
    """Changed nodes with both versions, `-` and `+`; added ones with `+` alone."""
    old = {node.name: node for node in read_graph(before).graph_def.node}
    for node in read_graph(after).graph_def.node:
        if node != old.get(node.name):
            if node.name in old:
                print("-", describe(old[node.name]))
            print("+", describe(node))


if __name__ == "__main__":
    main(*sys.argv[1:])
