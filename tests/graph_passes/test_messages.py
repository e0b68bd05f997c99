"""The message classes come without TensorFlow's runtime, and do not get in its way."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from graph_passes.errors import HcclFusionError
from graph_passes.messages import _bare_parent, dtype_name, dtype_size_bytes, types_pb2

_PROBE = """
import json, sys
{imports}
runtime_early = [name for name in sys.modules if name.startswith("tensorflow.python") or name == "tensorflow"]
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
names = sorted(name for name in dir(tf) if hasattr(tf, name))
constant = tf.constant([1.0, 2.0])
graph = tf.Graph()
with graph.as_default():
    tf.compat.v1.placeholder(tf.float32, [2], name="x")
print(json.dumps({{
    "runtime_early": runtime_early,
    "names": names,
    "sum": float(tf.reduce_sum(constant)),
    "same_class": {same_class},
    "core": tf.core.framework.graph_pb2.GraphDef is graph_pb2.GraphDef if hasattr(tf, "core") else None,
    "version": tf.__version__,
}}))
"""


def probe(imports: str, same_class: str) -> dict:
    code = _PROBE.format(imports=imports, same_class=same_class)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_tensorflow_imports_after_the_messages_just_as_without_them():
    after = probe(
        "import graph_passes, graph_passes.files, graph_passes.verify\n"
        "import hccl_fusion, hccl_fusion.fuse, hccl_fusion.plan_file\n"
        "from graph_passes.messages import GraphDef",
        "GraphDef is graph_pb2.GraphDef and isinstance(graph.as_graph_def(), GraphDef)",
    )
    plain = probe("", "True")

    assert after["runtime_early"] == []
    assert after["same_class"] is True
    assert after["names"] == plain["names"]
    assert {key: after[key] for key in ("sum", "core", "version")} == {
        key: plain[key] for key in ("sum", "core", "version")
    }


def test_a_missing_tensorflow_is_one_clear_error():
    with (
        pytest.raises(HcclFusionError, match=r"the package no_such_package_here is not installed.*pip install"),
        _bare_parent("no_such_package_here"),
    ):
        pass


def test_a_loaded_package_is_left_as_it_is():
    before = sys.modules["json"]
    with _bare_parent("json"):
        assert sys.modules["json"] is before
    assert sys.modules["json"] is before


def test_a_bare_parent_lends_its_path_and_goes_away_again(tmp_path, monkeypatch):
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("raise RuntimeError('ran')")
    (tmp_path / "heavy" / "light.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "heavy.light", raising=False)

    with _bare_parent("heavy"):
        assert importlib.import_module("heavy.light").VALUE == 7
    assert "heavy" not in sys.modules

    with pytest.raises(ModuleNotFoundError), _bare_parent("heavy"):
        importlib.import_module("heavy.missing")
    assert "heavy" not in sys.modules


@pytest.mark.parametrize(
    ("dtype", "name", "size_bytes"),
    [
        (types_pb2.DT_FLOAT, "float32", 4),
        (types_pb2.DT_FLOAT_REF, "float32", 4),
        (types_pb2.DT_DOUBLE, "float64", 8),
        (types_pb2.DT_HALF, "float16", 2),
        (types_pb2.DT_BFLOAT16, "bfloat16", 2),
        (types_pb2.DT_INT8, "int8", 1),
        (types_pb2.DT_UINT64, "uint64", 8),
        (types_pb2.DT_COMPLEX128, "complex128", 16),
        (types_pb2.DT_BOOL, "bool", 1),
        (types_pb2.DT_STRING, "string", None),
        (types_pb2.DT_RESOURCE, "resource", None),
        (99, "type 99", None),
    ],
)
def test_names_and_sizes_of_types(dtype, name, size_bytes):
    assert dtype_name(dtype) == name
    assert dtype_size_bytes(dtype) == size_bytes
