"""TensorFlow's GraphDef message classes, without TensorFlow's runtime.

`import tensorflow` takes seconds; the generated message classes of the very same package import in about 40 ms
when a bare parent module with the right search path stands in while they load. The parent is taken away again
afterwards, so that a later `import tensorflow` in the same process runs normally and finds these same classes.
"""

from __future__ import annotations

__all__ = [
    "AttrValue",
    "FunctionDef",
    "GraphDef",
    "MetaGraphDef",
    "NodeDef",
    "SavedModel",
    "TensorProto",
    "TensorShapeProto",
    "dtype_name",
    "dtype_size_bytes",
    "types_pb2",
]

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator

from graph_passes.errors import HcclFusionError


@contextlib.contextmanager
def _bare_parent(package: str) -> Iterator[None]:
    """Lets submodules of `package` be imported without running its `__init__`."""
    if package in sys.modules:
        yield
        return
    spec = importlib.machinery.PathFinder.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise HcclFusionError(
            f"the package {package} is not installed",
            expected="its protobuf classes",
            remedy="pip install tensorflow",
        )
    parent = types.ModuleType(package)
    parent.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = parent
    try:
        yield
    finally:
        del sys.modules[package]


with _bare_parent("tensorflow"):
    from tensorflow.core.framework import types_pb2
    from tensorflow.core.framework.attr_value_pb2 import AttrValue
    from tensorflow.core.framework.function_pb2 import FunctionDef
    from tensorflow.core.framework.graph_pb2 import GraphDef
    from tensorflow.core.framework.node_def_pb2 import NodeDef
    from tensorflow.core.framework.tensor_pb2 import TensorProto
    from tensorflow.core.framework.tensor_shape_pb2 import TensorShapeProto
    from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

_SIZE_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e5m2": 1, "float8_e4m3fn": 1, "qint8": 1, "quint8": 1,
    "half": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "qint16": 2, "quint16": 2,
    "float": 4, "int32": 4, "uint32": 4, "qint32": 4,
    "double": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_PYTHON_NAME = {"half": "float16", "float": "float32", "double": "float64"}


def _enum_name(dtype: int) -> str:
    """`DT_FLOAT` -> `float`; a reference type is named as the type that it refers to."""
    base = dtype - 100 if dtype > 100 else dtype
    try:
        name: str = types_pb2.DataType.Name(base)
    except ValueError:
        return f"type {dtype}"
    return name[len("DT_") :].lower()


def dtype_name(dtype: int) -> str:
    """The name that TensorFlow's Python API gives a `DataType` number, e.g. `float32`."""
    name = _enum_name(dtype)
    return _PYTHON_NAME.get(name, name)


def dtype_size_bytes(dtype: int) -> int | None:
    """Bytes of one element; None where elements have no fixed size (string, resource, variant)."""
    return _SIZE_BYTES.get(_enum_name(dtype))
