"""Which package may import which: read from the sources, so that a lazy import counts too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path for package in ("graph_passes", "hccl_fusion") for path in (ROOT / package).rglob("*.py"))


@dataclass(frozen=True)
class Import:
    """`module` is absolute; `is_lazy` inside a function, `is_for_types` under `if TYPE_CHECKING`."""

    module: str
    is_lazy: bool
    is_for_types: bool
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    yield from _visit(ast.parse(path.read_text(encoding="utf-8")), False, False)


def _visit(node: ast.AST, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        lazy = is_lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        types = is_for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, is_lazy, is_for_types, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield Import(child.module or "", is_lazy, is_for_types, child.lineno)
            for alias in child.names:
                yield Import(f"{child.module}.{alias.name}", is_lazy, is_for_types, child.lineno)
        else:
            yield from _visit(child, lazy, types)


def package_of(module: str) -> str:
    """The room a module is in: `graph_passes`, `hccl_fusion.cli`, `hccl_fusion` itself, …"""
    parts = module.split(".")
    folder = ROOT.joinpath(*parts[:2])
    return ".".join(parts[:2]) if len(parts) > 1 and folder.is_dir() else parts[0]


each_module = pytest.mark.parametrize("path", MODULES, ids=module_name)


@pytest.mark.parametrize("path", sorted((ROOT / "graph_passes").rglob("*.py")), ids=module_name)
def test_graph_passes_knows_nothing_of_hccl_fusion(path):
    assert [found for found in imports_of(path) if found.module.split(".")[0] == "hccl_fusion"] == []


# TensorFlow's runtime: only where graphs are run or built, and only once it is needed.
MAY_USE_TENSORFLOW = ("hccl_fusion.runtime", "hccl_fusion.demo", "hccl_fusion.tuning.profiles")


def imports_of_tensorflow(path: Path) -> list[Import]:
    found = [i for i in imports_of(path) if i.module.split(".")[0] in ("tensorflow", "keras") and not i.is_for_types]
    if module_name(path) == "graph_passes.messages":
        # Its messages alone, which come without the runtime.
        return [i for i in found if not i.module.startswith("tensorflow.core.")]
    return found


HEAVY = {module_name(path) for path in MODULES if any(not i.is_lazy for i in imports_of_tensorflow(path))}


@each_module
def test_tensorflow_is_imported_only_where_graphs_run(path):
    assert module_name(path).startswith(MAY_USE_TENSORFLOW) or imports_of_tensorflow(path) == []


@each_module
def test_a_module_that_starts_with_tensorflow_is_itself_imported_only_once_it_is_needed(path):
    """A class that extends one of TensorFlow's needs it at once; so nobody else may need that module at once."""
    name = module_name(path)
    now = {found.module for found in imports_of(path) if not found.is_lazy and not found.is_for_types}
    assert name in HEAVY or not now & HEAVY


# cli -> report, runtime, tuning -> fuse -> plan, strategy, segmentation -> graph_passes
EDGES = {
    "graph_passes": set(),
    "hccl_fusion": {"graph_passes", "hccl_fusion"},
    "hccl_fusion.runtime": {"graph_passes", "hccl_fusion", "hccl_fusion.runtime"},
    "hccl_fusion.tuning": {"graph_passes", "hccl_fusion", "hccl_fusion.tuning", "hccl_fusion.runtime"},
}
# Modules at the top that others are reached through: the public names, HCCL's group functions, the command itself.
FACADES = ("hccl_fusion", "hccl_fusion.groups", "hccl_fusion.__main__")


@each_module
def test_the_lower_rooms_have_no_door_to_the_upper_ones(path):
    name = module_name(path)
    allowed = EDGES.get(package_of(name))
    if allowed is None or name in FACADES:
        return
    allowed = allowed | {package_of(name)}
    for found in imports_of(path):
        room = package_of(found.module)
        # The rules themselves may call TensorFlow's shape inference, but only once a shape is missing.
        is_last_resort = room == "hccl_fusion.runtime" and found.is_lazy
        if found.module.split(".")[0] in ("graph_passes", "hccl_fusion"):
            assert room in allowed or is_last_resort, f"line {found.line} imports {found.module}"


@each_module
def test_only_the_command_imports_the_command_line(path):
    name = module_name(path)
    if package_of(name) == "hccl_fusion.cli" or name == "hccl_fusion.__main__":
        return
    assert [found for found in imports_of(path) if package_of(found.module) == "hccl_fusion.cli"] == []


def test_no_module_is_imported_in_a_circle():
    """Imports at the top of modules; those inside functions, and those for types alone, are aside."""
    names = {module_name(path) for path in MODULES}
    edges = {
        module_name(path): {
            i.module for i in imports_of(path) if i.module in names and not (i.is_lazy or i.is_for_types)
        }
        for path in MODULES
    }
    done: set[str] = set()
    for start in sorted(names):
        _walk(start, edges, [], done)


def _walk(name: str, edges: dict[str, set[str]], path: list[str], done: set[str]) -> None:
    if name in done:
        return
    assert name not in path, " -> ".join([*path[path.index(name) :], name])
    for target in sorted(edges[name] - {name}):
        _walk(target, edges, [*path, name], done)
    done.add(name)
