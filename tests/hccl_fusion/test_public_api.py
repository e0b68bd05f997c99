"""What the packages offer: the public names, and that all of it is described."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graph_passes
import hccl_fusion

PUBLIC_NAMES = [
    "BroadcastCallback",
    "BroadcastHook",
    "DistributedOptimizer",
    "Emit",
    "FuseResult",
    "HcclFusionError",
    "NPUDistributedOptimizer",
    "Plan",
    "PlanOptions",
    "Strategy",
    "StrategyError",
    "StrategyKind",
    "StrategyWarning",
    "broadcast_variables",
    "collective_device",
    "compare_graphs",
    "fuse",
    "init",
    "is_initialised",
    "list_gradients",
    "local_rank",
    "local_size",
    "plan_graph",
    "rank",
    "read_plan",
    "reduce_tensors",
    "reset_split_strategy",
    "segment_boundaries",
    "session_config",
    "session_target",
    "set_split_strategy_by_idx",
    "set_split_strategy_by_size",
    "shutdown",
    "simulate_ranks",
    "size",
]

_ROOTS = [Path(package.__file__).parent for package in (graph_passes, hccl_fusion)]
MODULES = {
    ".".join(path.relative_to(root.parent).with_suffix("").parts): path
    for root in _ROOTS
    for path in sorted(root.rglob("*.py"))
}
every_module = pytest.mark.parametrize("name", MODULES)


def test_the_public_names():
    assert hccl_fusion.__all__ == PUBLIC_NAMES
    assert set(PUBLIC_NAMES) <= set(dir(hccl_fusion))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_public_name_loads_and_is_described(name):
    value = getattr(hccl_fusion, name)
    assert getattr(hccl_fusion, name) is value
    assert value.__name__ == name
    assert not inspect.ismodule(value)
    assert inspect.getdoc(value)


@pytest.mark.parametrize(
    "first",
    [
        "from hccl_fusion import plan_graph, fuse",
        "from hccl_fusion import fuse, plan_graph",
        "import hccl_fusion.fuse",
        "from hccl_fusion.fuse import Emit",
        "import hccl_fusion.cli.fuse_command",
        "import hccl_fusion; hccl_fusion.Emit",
    ],
)
def test_the_function_fuse_is_not_hidden_by_its_module(first):
    code = (
        f"{first}\nimport hccl_fusion, sys\nfrom hccl_fusion import fuse\n"
        "assert fuse is hccl_fusion.fuse is sys.modules['hccl_fusion.fuse'].fuse\nassert callable(fuse)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'hccl_fusion' has no attribute 'fuze'"):
        hccl_fusion.fuze  # noqa: B018


def test_the_setters_have_the_parameters_of_hccl():
    for setter, first in (("by_idx", "idxList"), ("by_size", "dataSizeList")):
        parameters = inspect.signature(getattr(hccl_fusion, f"set_split_strategy_{setter}")).parameters
        assert list(parameters) == [first, "group"]
        assert parameters["group"].default == "hccl_world_group"
    split = importlib.import_module("hccl_fusion.split")
    assert split.set_split_strategy_by_idx is hccl_fusion.set_split_strategy_by_idx
    assert split.set_split_strategy_by_size is hccl_fusion.set_split_strategy_by_size


def test_the_errors_are_one_family():
    errors = importlib.import_module("hccl_fusion.errors")
    for name in errors.__all__:
        value = getattr(errors, name)
        if name.endswith("Error"):
            assert issubclass(value, hccl_fusion.HcclFusionError)
    assert issubclass(hccl_fusion.StrategyError, ValueError)
    assert issubclass(hccl_fusion.StrategyWarning, Warning)


def test_there_are_modules():
    assert {"graph_passes.files", "hccl_fusion.cli.main", "hccl_fusion.runtime.in_process"} <= set(MODULES)


def tree_of(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@every_module
def test_a_module_says_what_it_is_and_what_it_offers(name):
    tree = tree_of(name)
    assert ast.get_docstring(tree), "no docstring"
    if name.endswith("__main__"):
        return  # a script offers nothing
    offered = offered_names(tree)
    assert offered is not None, "no __all__"
    assert len(set(offered)) == len(offered)
    loose = sorted(
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_" and node.name not in offered
    )
    assert not loose, f"neither private nor in __all__: {loose}"


def offered_names(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    return None


@every_module
def test_all_that_a_module_offers_is_there(name):
    if name.endswith("__main__"):
        return
    module = importlib.import_module(name.removesuffix(".__init__"))
    for offered in module.__all__:
        assert getattr(module, offered) is not None, offered


@every_module
def test_public_functions_classes_and_methods_are_described(name):
    assert list(undescribed(tree_of(name))) == []


def undescribed(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Public definitions without a docstring, also those inside public classes."""
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield f"{prefix}{node.name}, line {node.lineno}"
        if isinstance(node, ast.ClassDef):
            yield from undescribed(node, f"{prefix}{node.name}.")


@every_module
def test_the_first_line_of_a_docstring_is_a_sentence(name):
    for node in ast.walk(tree_of(name)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            text = ast.get_docstring(node) or "None."
            paragraph = text.split("\n\n")[0].strip()
            assert paragraph[-1] in ".:?!", f"{getattr(node, 'name', name)}: {paragraph!r}"
