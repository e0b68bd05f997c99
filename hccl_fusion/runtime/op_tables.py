"""Makes `graph_passes/tables/*.json` from the op registry of the installed TensorFlow.

The passes never load TensorFlow's runtime, so what they need to know of its ops is written down once:
`outputs.json` has the outputs of every op, `training_ops.json` the inputs of every op that updates a variable from
a gradient. Run `python -m hccl_fusion.runtime.op_tables` to write them anew; a test fails when they lack an op.
"""

from __future__ import annotations

__all__ = ["main", "output_table", "registered_ops", "training_table"]

import json
import os
import re
from collections.abc import Iterable
from typing import Any

import graph_passes

_TRAINING_OP = re.compile(r"(Resource|Sparse|ResourceSparse)?Apply[A-Z]")
_GRADIENT_INPUTS = ("grad", "delta")  # gradient descent calls it delta


def registered_ops() -> list[Any]:
    """Every OpDef that the installed TensorFlow registers, by name."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    op_list = op_def_pb2.OpList()
    op_list.ParseFromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return sorted(op_list.op, key=lambda op: op.name)


def output_table(ops: Iterable[Any]) -> dict[str, str]:
    """Outputs of each op: `"y"`, `"false true"`, or `"output:num_split"` where an attribute gives the count."""

    def describe(arg: Any) -> str:
        count = arg.number_attr or arg.type_list_attr
        return f"{arg.name}:{count}" if count else str(arg.name)

    return {op.name: " ".join(describe(arg) for arg in op.output_arg) for op in ops}


def training_table(ops: Iterable[Any]) -> dict[str, dict[str, int]]:
    """Positions of the variable, the gradient and (sparse ops) the indices among each training op's inputs."""
    table: dict[str, dict[str, int]] = {}
    for op in ops:
        inputs = [arg.name for arg in op.input_arg]
        gradient = next((name for name in _GRADIENT_INPUTS if name in inputs), None)
        if not _TRAINING_OP.match(op.name) or "var" not in inputs or gradient is None:
            continue
        table[op.name] = {"var": inputs.index("var"), "grad": inputs.index(gradient)}
        if "indices" in inputs:
            table[op.name]["indices"] = inputs.index("indices")
    return table


def main() -> None:
    """Writes the tables into the package."""
    folder = os.path.join(os.path.dirname(graph_passes.__file__), "tables")
    ops = registered_ops()
    for name, table in (("outputs", output_table(ops)), ("training_ops", training_table(ops))):
        with open(os.path.join(folder, f"{name}.json"), "w", encoding="utf-8") as stream:
            json.dump(table, stream, indent=0, sort_keys=True)
            stream.write("\n")


if __name__ == "__main__":
    main()
