"""The command line: results, their JSON, options, streams and exit codes. What is refused: test_cli_bad_input.py."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from builders import DOUBLE, FLOAT, HALF, WORLD, Nodes, Shape, Shapes, Type, gradients_graph, node_of

import hccl_fusion
from graph_passes.files import read_graph
from graph_passes.graph import Graph
from graph_passes.messages import GraphDef
from graph_passes.op_tables import MOCK_ATTR
from graph_passes.shapes import ShapeReader
from hccl_fusion.cli import main
from hccl_fusion.cli.main import cli
from hccl_fusion.cli.output import Progress
from hccl_fusion.segmentation import padded_bytes, segment_boundaries

COMMANDS = ("list", "plan", "fuse", "verify", "demo")
SCRIPT = str(Path(sysconfig.get_path("scripts")) / "hccl-fusion")
# The keys of docs/json.md: those that every tool may rely on, then what we add.
LIST_KEYS = (
    "index", "section", "all_reduce", "tensor", "variable", "shape", "dtype", "bytes", "padded_bytes", "segment",
    "reason",
)  # fmt: skip
PLAN_KEYS = ("schema_version", "sections", "single", "fingerprint")
SECTION_KEYS = (
    "graph", "group", "dtype", "reduction", "fusion_id", "count", "strategy", "boundaries", "segments", "gradients",
)  # fmt: skip
SECTION_EXTRAS = ("values", "bytes")
VERIFY_KEYS = ("schema_version", "equal", "ranks", "outputs")
OUTPUT_KEYS = ("name", "max_abs_diff", "bit_equal")


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK_SIZE", raising=False)


@pytest.fixture
def run(capsys):
    """Runs a command, which must end as expected."""

    def call(*args: object, code: int = 0) -> Ran:
        capsys.readouterr()
        ended = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert ended == code, captured.err
        return Ran(ended, captured.out, captured.err)

    return call


def write(name: str, graph_def: GraphDef) -> str:
    Path(name).write_bytes(graph_def.SerializeToString(deterministic=True))
    return name


def equal_graph(count: int = 6, elements: int = 100) -> GraphDef:
    return gradients_graph(*[(elements,)] * count)


def ops(path: str, op: str) -> list[Any]:
    return [node for node in read_graph(path).graph_def.node if node.op == op]


def segments(document: dict[str, Any]) -> list[list[list[int]]]:
    return [section["segments"] for section in document["sections"]]


def mixed_graph() -> GraphDef:
    """Four float32 gradients, of which the last trains a variable, and three that stay single."""
    nodes = Nodes()
    nodes.gradient("ar_0", (2, 3))
    nodes.gradient("ar_1", (4,))
    nodes.gradient("ar_2", ())
    nodes.gradient("ar_3", (16, 16))
    nodes.add("w", "VariableV2", dtype=Type(FLOAT), shape=Shape((16, 16)))
    nodes.constant("rate", 0.1)
    nodes.add("train", "ApplyGradientDescent", "w", "rate", "ar_3/out", T=Type(FLOAT))
    nodes.gradient("double", (3,), DOUBLE)
    nodes.gradient("off", (5,), fusion=0)
    nodes.gradient("open", (-1, 2))
    return nodes.graph_def


# ------------------------------------------------------------------------------------------------ list


def row(index, segment, name, shape, dtype, size, padded, reason=None, section=f"{WORLD} float32 sum", variable=None):
    tensor = f"{name}/g"
    values = (index, section, name, tensor, variable, shape, dtype, size, padded, segment, reason)
    return dict(zip(LIST_KEYS, values))


MIXED_ROWS = [
    row(0, 0, "ar_0", [2, 3], "float32", 24, 64),
    row(1, 0, "ar_1", [4], "float32", 16, 64),
    row(2, 1, "ar_2", [], "float32", 4, 64),
    row(3, 1, "ar_3", [16, 16], "float32", 1024, 1056, variable="w"),
    row(None, None, "double", [3], "float64", 24, 64, "alone", f"{WORLD} float64 sum"),
    row(None, None, "off", [5], "float32", 20, 64, "fusion=0"),
    row(None, None, "open", None, "float32", None, None, "unknown-shape"),
]
MIXED = ("list", "g.pb", "--idx", "1,3", "--no-shape-inference")


def test_list_json(run):
    write("g.pb", mixed_graph())
    ran = run(*MIXED, "--json")
    assert list(ran.json) == ["schema_version", "gradients"]
    assert ran.json["schema_version"] == 1
    assert [tuple(gradient) for gradient in ran.json["gradients"]] == [LIST_KEYS] * 7
    assert ran.json["gradients"] == MIXED_ROWS
    assert ran.err == ""


def cells(row: dict[str, Any], section: str, share: str) -> list[str]:
    """What the text table says of a row of the JSON."""
    shape = row["shape"]
    texts = [
        "-" if row["index"] is None else str(row["index"]),
        section,
        "-" if row["segment"] is None else str(row["segment"]),
        row["tensor"],
        row["variable"] or "?",
        "?" if shape is None else "x".join(map(str, shape)) or "scalar",
        row["dtype"],
        "?" if row["bytes"] is None else str(row["bytes"]),
        "?" if row["padded_bytes"] is None else str(row["padded_bytes"]),
        share,
        row["reason"] or "",
    ]
    return [text for text in texts if text]


def table_rows(text: str, *headings: str) -> list[list[str]]:
    """The rows of the table whose first columns have these headings, as words; they end at an empty line."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if tuple(line.split()[: len(headings)]) == headings)
    stop = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    return [line.split() for line in lines[start + 2 : stop]]


def test_list_text_says_what_the_json_says(run):
    write("g.pb", mixed_graph())
    ran = run(*MIXED)
    total = 64 + 64 + 64 + 1056
    shares = [f"{100 * part / total:.2f}" for part in (64, 128, 192, total)]
    expected = [cells(row, "0", share) for row, share in zip(MIXED_ROWS, shares)]
    expected += [cells(row, "-", "") for row in MIXED_ROWS[4:]]
    assert table_rows(ran.out, "index", "section") == expected
    assert ran.out.startswith(f"section 0: {WORLD} float32 sum, 4 gradients, 1.0 KiB, strategy idx 1,3\n")
    assert ran.err == ""


def test_list_asks_tensorflow_for_a_shape_that_the_graph_does_not_tell(run):
    nodes = Nodes()
    nodes.gradient("ar_0", (4, 2))
    nodes.placeholder("x", (3, 5))
    nodes.add("square", "MatMul", "x", "x", T=Type(FLOAT), transpose_a=True, transpose_b=False)
    nodes.all_reduce("ar_1", "square")
    write("g.pb", nodes.graph_def)
    by_name = {row["all_reduce"]: row for row in run("list", "g.pb", "--json").json["gradients"]}
    assert (by_name["ar_1"]["shape"], by_name["ar_1"]["reason"]) == ([5, 5], None)
    by_name = {
        row["all_reduce"]: row for row in run("list", "g.pb", "--json", "--no-shape-inference").json["gradients"]
    }
    assert (by_name["ar_1"]["shape"], by_name["ar_1"]["reason"]) == (None, "unknown-shape")
    in_a_process = shell("list", "g.pb")
    assert (in_a_process.returncode, in_a_process.stderr) == (0, b""), "TensorFlow's start-up lines are no log of ours"
    assert b"5x5" in in_a_process.stdout


def test_a_gradient_of_a_function_is_named_with_it(run):
    nodes = Nodes()
    nodes.gradient("ar", (2,))
    body = nodes.function("step", {"x": FLOAT}, {"y": (FLOAT, "inner:output:0")})
    body.all_reduce("inner", "x")
    write("g.pb", nodes.graph_def)
    ran = run("list", "g.pb", "--json", "--no-shape-inference")
    assert [row["all_reduce"] for row in ran.json["gradients"]] == ["ar", "step/inner"]
    assert "step/x" in run("list", "g.pb", "--no-shape-inference").out


# ------------------------------------------------------------------------------------------------ plan


def test_plan_json(run):
    write("g.pb", mixed_graph())
    ran = run("plan", "g.pb", "--idx", "1,3", "--no-shape-inference", "--json")
    document = ran.json
    assert tuple(document) == PLAN_KEYS
    assert re.fullmatch("[0-9a-f]{64}", document.pop("fingerprint"))
    (section,) = document["sections"]
    assert sorted(section) == sorted(SECTION_KEYS + SECTION_EXTRAS)
    assert document == {
        "schema_version": 1,
        "sections": [
            {
                "graph": "",
                "group": WORLD,
                "dtype": "float32",
                "reduction": "sum",
                "fusion_id": -1,
                "count": 4,
                "strategy": "idx",
                "values": [1, 3],
                "boundaries": [1, 3],
                "segments": [[0, 1], [2, 3]],
                "gradients": ["ar_0", "ar_1", "ar_2", "ar_3"],
                "bytes": [24, 16, 4, 1024],
            }
        ],
        "single": [
            {"name": "off", "graph": "", "reason": "fusion=0"},
            {"name": "open", "graph": "", "reason": "unknown-shape"},
            {"name": "double", "graph": "", "reason": "alone"},
        ],
    }
    assert ran.err == f"INFO hccl_fusion: {RESULT_LINE}\n"


RESULT_LINE = "gradient segment result: segment num: 2, segment index list: [0,1] [2,3]  "


def test_plan_text_says_what_the_json_says(run):
    write("g.pb", mixed_graph())
    options = ("plan", "g.pb", "--idx", "1,3", "--no-shape-inference")
    document = run(*options, "--json").json
    ran = run(*options)
    assert table_rows(ran.out, "section", "segment") == [
        ["0", "0", "[0,1]", "2", "40", "B", "3.75", "ar_0"],
        ["0", "1", "[2,3]", "2", "1.0", "KiB", "96.25", "ar_2"],
    ]
    singles = [line for line in ran.out.splitlines() if line.startswith("single")]
    assert singles == ["single, alone: double", "single, fusion=0: off", "single, unknown-shape: open"]
    assert ran.out.endswith(f"fingerprint: {document['fingerprint']}\n")


def dependent_graph() -> GraphDef:
    """ar_2 depends on the reduced ar_0: the one segment that is asked for is divided before it."""
    nodes = Nodes()
    nodes.gradient("ar_0", (4,))
    nodes.gradient("ar_1", (4,))
    nodes.all_reduce("ar_2", "ar_0/out", _output_shapes=Shapes(((4,),)))
    nodes.all_reduce("ar_3", "ar_1/g")
    return nodes.graph_def


def test_a_division_is_told(run):
    write("g.pb", dependent_graph())
    (section,) = run("plan", "g.pb", "--single", "--json").json["sections"]
    at = section["gradients"].index("ar_2")
    assert section["boundaries"] == [3]
    assert section["segments"] == [[0, at - 1], [at, 3]]
    assert section["divisions"] == [{"at": at, "on": "ar_0", "reason": "ar_2 depends on the reduced ar_0"}]
    line = f"  divided before index {at}: ar_2 depends on the reduced ar_0\n"
    assert line in run("plan", "g.pb", "--single").out
    assert line in run("list", "g.pb", "--single").out
    assert line in run("fuse", "g.pb", "--single", "-o", "out.pb").out


def test_the_parts_of_a_segment_on_two_devices(run):
    nodes = Nodes()
    for number in range(4):
        nodes.gradient(f"ar_{number}", (4,), device=f"/device:CPU:{number % 2}")
    write("g.pb", nodes.graph_def)
    (section,) = run("plan", "g.pb", "--single", "--json").json["sections"]
    assert section["segments"] == [[0, 3]]
    assert section["parts"] == [[[0, 2], [1, 3]]]


def test_a_collapsed_boundary_is_told(run):
    write("g.pb", gradients_graph((250,), (24500,), (250,)))
    options = ("plan", "g.pb", "--size", "10,10,10,70", "--size-accounting", "raw")
    (section,) = run(*options, "--json").json["sections"]
    assert section["boundaries"] == [0, 1, 2]
    assert section["notes"]
    assert f"  note: {section['notes'][0]}\n" in run(*options).out


STRATEGIES = [
    ((), "default", [[0, 5]]),
    (("--idx", "1,5"), "idx", [[0, 1], [2, 5]]),
    (("--size", "50,50"), "size", [[0, 2], [3, 5]]),
    (("--max-bytes", "900"), "max-bytes", [[0, 1], [2, 3], [4, 5]]),
    (("--max-bytes", "0.5KiB"), "max-bytes", [[i, i] for i in range(6)]),
    (("--segments", "3"), "segments", [[0, 1], [2, 3], [4, 5]]),
    (("--single",), "single", [[0, 5]]),
    (("--none",), "none", [[i, i] for i in range(6)]),
]


@pytest.mark.parametrize(("options", "name", "expected"), STRATEGIES)
def test_every_strategy_in_every_command(run, options, name, expected):
    write("g.pb", equal_graph())
    (section,) = run("plan", "g.pb", *options, "--json").json["sections"]
    assert (section["strategy"], section["segments"]) == (name, expected)
    assert section["boundaries"] == [last for _, last in expected]

    fused = run("fuse", "g.pb", *options, "-o", "out.pb", "--json").json
    assert segments(fused) == [expected]
    is_fused = len(expected) < 6
    assert fused["modified"] is is_fused
    assert len(ops("out.pb", "HcomAllReduce")) == len(expected)

    rows = run("list", "g.pb", *options, "--json").json["gradients"]
    reason = None if is_fused else "no-fusion" if name == "none" else "one-per-segment"
    segment_of = [number for number, (first, last) in enumerate(expected) for _ in range(first, last + 1)]
    assert [row["segment"] for row in rows] == (segment_of if is_fused else [None] * 6)
    assert {row["reason"] for row in rows} == {reason}
    assert [single["reason"] for single in fused["single"]] == ([] if is_fused else [reason] * 6)


PAIRS = [
    (first, second)
    for position, (first, *_) in enumerate(STRATEGIES[1:])
    for second, *_ in STRATEGIES[position + 2 :]
    if first[0] != second[0]
]


@pytest.mark.parametrize(("first", "second"), [*PAIRS, (("--plan", "p.json"), ("--single",))])
@pytest.mark.parametrize("command", [("list",), ("plan",), ("fuse", "-o", "out.pb")])
def test_strategies_exclude_each_other(run, command, first, second):
    write("g.pb", equal_graph())
    ran = run(*command, "g.pb", *first, *second, code=2)
    for option in (first[0], second[0]):
        assert option in ran.err
    assert ran.out == ""


def test_the_plan_file_goes_round(run):
    write("g.pb", equal_graph())
    made = run("plan", "g.pb", "--idx", "0,3,5", "-o", "p.json", "--json").json
    assert json.loads(Path("p.json").read_text(encoding="utf-8")) == made
    fused = run("fuse", "g.pb", "--plan", "p.json", "-o", "out.pb", "--plan-out", "q.json", "--json").json
    assert segments(fused) == segments(made) == [[[0, 0], [1, 3], [4, 5]]]
    assert fused["fingerprint"] == made["fingerprint"]
    written = json.loads(Path("q.json").read_text(encoding="utf-8"))
    assert written == {key: fused[key] for key in PLAN_KEYS}
    assert segments(run("plan", "g.pb", "--plan", "q.json", "--json").json) == segments(made)
    rows = run("list", "g.pb", "--plan", "p.json", "--json").json["gradients"]
    assert [row["segment"] for row in rows] == [0, 1, 1, 1, 2, 2]
    run("fuse", "g.pb", "--idx", "0,3,5", "-o", "direct.pb")
    assert Path("direct.pb").read_bytes() == Path("out.pb").read_bytes()


def test_a_plan_file_is_fitted_to_a_graph_that_has_changed(run):
    write("g.pb", equal_graph(6))
    run("plan", "g.pb", "--idx", "1,5", "-o", "p.json")
    nodes = Nodes()
    for number in (0, 1, 3, 4, 5, 6):
        nodes.gradient(f"ar_{number}", (100 + (number == 3),))
    write("h.pb", nodes.graph_def)
    ran = run("plan", "h.pb", "--plan", "p.json", "--json")
    (section,) = ran.json["sections"]
    assert section["segments"] == [[0, 1], [2, 5]]
    assert section["notes"] == [
        "1 gradients added: ar_6",
        "1 gradients removed: ar_2",
        "1 gradients resized: ar_3 400 -> 404 bytes",
    ]
    text = run("plan", "h.pb", "--plan", "p.json").out
    for note in section["notes"]:
        assert f"  note: {note}\n" in text


def test_a_plan_file_may_be_brought_up_to_date_in_place(run):
    write("g.pb", equal_graph())
    run("plan", "g.pb", "--idx", "1,5", "-o", "p.json")
    before = json.loads(Path("p.json").read_bytes())
    run("plan", "g.pb", "--plan", "p.json", "-o", "p.json")
    assert segments(json.loads(Path("p.json").read_bytes())) == segments(before)


def test_plan_on_stdout(run):
    write("g.pb", equal_graph())
    document = run("plan", "g.pb", "--idx", "1,5", "--json").json
    assert run("plan", "g.pb", "--idx", "1,5", "-o", "-").json == document
    assert run("plan", "g.pb", "--idx", "1,5", "-o", "-", "--json").json == document
    ran = run("fuse", "g.pb", "--idx", "1,5", "-o", "out.pb", "--plan-out", "-")
    assert ran.json == document
    assert "6 of 6 all-reduces became 2" in ran.err
    assert sorted(os.listdir()) == ["g.pb", "out.pb"]


def test_hccl_calls(run):
    write("g.pb", equal_graph())
    ran = run("plan", "g.pb", "--size", "50,50", "--hccl-calls")
    assert ran.out == f'set_split_strategy_by_idx([2, 5], group="{WORLD}")\n'
    try:
        exec(ran.out, {"set_split_strategy_by_idx": hccl_fusion.set_split_strategy_by_idx})
        plan, _ = hccl_fusion.plan_graph(read_graph("g.pb").graph_def)
    finally:
        hccl_fusion.reset_split_strategy()
    assert [section.last_indices for section in plan.sections] == [(2, 5)]


def test_hccl_calls_say_what_hccl_cannot_express(run):
    write("many.pb", equal_graph(20))
    comment, call = run("plan", "many.pb", "--max-bytes", "900", "--hccl-calls").out.splitlines()
    assert comment.startswith("# HCCL documents at most 8 segments")
    assert call.startswith("set_split_strategy_by_idx([1, 3, 5,")
    write("two.pb", two_types())
    assert run("plan", "two.pb", "--size", "50,50", "--hccl-calls").out.startswith(
        "# HCCL takes one index list a group"
    )
    write("one.pb", equal_graph(1))
    assert run("plan", "one.pb", "--hccl-calls").out.startswith("# no section takes a strategy")


def two_types() -> GraphDef:
    nodes = Nodes()
    for number in range(3):
        nodes.gradient(f"single_{number}", (100,))
    for number in range(4):
        nodes.gradient(f"half_{number}", (100,), HALF)
    return nodes.graph_def


def test_an_index_list_over_two_types(run):
    write("g.pb", two_types())
    document = run("plan", "g.pb", "--idx", "4,6", "--json").json
    by_type = {section["dtype"]: section for section in document["sections"]}
    assert by_type["float32"]["segments"] == [[0, 2]]
    assert by_type["float16"]["segments"] == [[0, 1], [2, 3]]
    note = "index list [4,6] read over all 7 gradients of the group"
    assert by_type["float16"]["notes"] == [note]
    assert f"  note: {note}\n" in run("plan", "g.pb", "--idx", "4,6").out


def test_group_cuts_the_one_group_only(run):
    nodes = Nodes()
    for number in range(3):
        nodes.gradient(f"world_{number}", (100,))
        nodes.gradient(f"mine_{number}", (100,), group="mine")
    write("g.pb", nodes.graph_def)
    document = run("plan", "g.pb", "--group", "mine", "--idx", "0,2", "--json").json
    by_group = {section["group"]: section for section in document["sections"]}
    assert (by_group["mine"]["strategy"], by_group["mine"]["segments"]) == ("idx", [[0, 0], [1, 2]])
    assert (by_group[WORLD]["strategy"], by_group[WORLD]["segments"]) == ("default", [[0, 2]])


def test_shape_mode(run):
    count, elements = 12, 100_000
    write("g.pb", equal_graph(count, elements))
    sizes = [padded_bytes(4 * elements)] * count
    expected = segment_boundaries(sizes, "default", shape_mode="unknown", buffer_mib=2)
    known = run("plan", "g.pb", "--json").json["sections"][0]
    unknown = run("plan", "g.pb", "--shape-mode", "unknown", "--buffer-mib", "2", "--json").json["sections"][0]
    assert unknown["boundaries"] == list(dict.fromkeys(expected))
    assert unknown["boundaries"] != known["boundaries"]


def test_size_accounting(run):
    write("g.pb", gradients_graph(*[(1,)] * 8, (64,)))
    raw = [4] * 8 + [256]
    options = ("plan", "g.pb", "--size", "50,50", "--json")
    padded = run(*options).json["sections"][0]
    assert padded["boundaries"] == segment_boundaries([padded_bytes(size) for size in raw], "size", (50, 50))
    unpadded = run(*options, "--size-accounting", "raw").json["sections"][0]
    assert unpadded["boundaries"] == list(dict.fromkeys(segment_boundaries(raw, "size", (50, 50))))
    assert unpadded["boundaries"] != padded["boundaries"]


# ------------------------------------------------------------------------------------------------ fuse


def test_fuse_text(run):
    write("g.pb", mixed_graph())
    ran = run("fuse", "g.pb", "--idx", "1,3", "-o", "out.pb", "--no-shape-inference")
    assert ran.out.splitlines() == [
        "g.pb: 4 of 7 all-reduces became 2; 3 stay as they are",
        f"  {WORLD} float32 sum: [0,1] [2,3]",
        "verified, written to out.pb",
    ]
    assert ran.err == f"INFO hccl_fusion: {RESULT_LINE}\n"


def test_fuse_json(run):
    write("g.pb", mixed_graph())
    ran = run("fuse", "g.pb", "--idx", "1,3", "-o", "out.pb", "--plan-out", "p.json", "--no-shape-inference", "--json")
    assert tuple(ran.json) == (*PLAN_KEYS, "modified", "notes")
    assert ran.json["modified"] is True
    assert all(isinstance(note, str) for note in ran.json["notes"])
    plan = json.loads(Path("p.json").read_text(encoding="utf-8"))
    assert plan == {key: ran.json[key] for key in PLAN_KEYS}
    assert plan == run("plan", "g.pb", "--idx", "1,3", "--no-shape-inference", "--json").json


def test_fusing_again_changes_nothing(run):
    write("g.pb", equal_graph())
    run("fuse", "g.pb", "--idx", "1,5", "-o", "out.pb")
    ran = run("fuse", "out.pb", "-o", "again.pb")
    assert ran.out.splitlines()[0] == "out.pb: 0 of 2 all-reduces became 0; 2 stay as they are"
    assert ran.out.splitlines()[-1] == "nothing to change, copied to again.pb"
    assert run("fuse", "out.pb", "-o", "again.pb", "--json").json["modified"] is False
    assert Path("again.pb").read_bytes() == Path("out.pb").read_bytes()


def test_emit_fused_and_fusion_id(run):
    write("g.pb", equal_graph())
    run("fuse", "g.pb", "--idx", "1,5", "-o", "fused.pb", "--emit", "fused")
    assert [node.attr["fusion"].i for node in ops("fused.pb", "HcomAllReduce")] == [0, 0]
    assert [len(node.input) - 1 for node in ops("fused.pb", "ConcatV2")] == [2, 4]
    ran = run("fuse", "g.pb", "--idx", "1,5", "-o", "tagged.pb", "--emit", "fusion-id")
    assert ran.out.startswith("g.pb: 6 of 6 all-reduces are marked to become 2; 0 stay as they are\n")
    tags = {node.name: (node.attr["fusion"].i, node.attr["fusion_id"].i) for node in ops("tagged.pb", "HcomAllReduce")}
    assert tags == {f"ar_{number}": (2, 0 if number < 2 else 1) for number in range(6)}


def group_sizes(path: str) -> list[int]:
    """The number of ranks that each collective is told."""
    graph_def = read_graph(path).graph_def
    graph = Graph.of_graph(graph_def)
    reader = ShapeReader(graph)
    return [
        reader.constant_ints(graph.producers(number)[1])[0]
        for number, op in enumerate(graph.ops)
        if op == "CollectiveReduceV2"
    ]


def mock_ranks(path: str) -> list[int]:
    return [node.attr[MOCK_ATTR].i for node in read_graph(path).graph_def.node if MOCK_ATTR in node.attr]


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [((), None, 1), ((), "8", 8), (("--ranks", "4"), "8", 4), (("-n", "2"), None, 2)],
)
@pytest.mark.parametrize(("form", "ranks_of"), [("collective", group_sizes), ("mock", mock_ranks)])
def test_emit_lowered_forms_for_a_number_of_ranks(run, monkeypatch, form, ranks_of, options, environment, expected):
    write("g.pb", equal_graph())
    if environment is not None:
        monkeypatch.setenv("RANK_SIZE", environment)
    run("fuse", "g.pb", "--idx", "1,5", "-o", "out.pb", "--emit", form, *options)
    assert ranks_of("out.pb") == [expected] * 2
    assert ops("out.pb", "HcomAllReduce") == []


@pytest.mark.parametrize("form", ["fused", "fusion-id", "collective", "mock"])
def test_chain(run, form):
    write("g.pb", equal_graph())

    def orders(*options: str) -> int:
        run("fuse", "g.pb", "--idx", "1,5", "-o", "out.pb", "--emit", form, *options)
        nodes = read_graph("out.pb").graph_def.node
        return sum(text.startswith("^") for node in nodes if node.op != "Const" for text in node.input)

    assert orders() == orders("--chain") == 1
    assert orders("--no-chain") == 0


def test_keep(run):
    write("g.pb", equal_graph())
    before = {node.name: node for node in read_graph("g.pb").graph_def.node}
    options = ("--single", "-o", "out.pb", "--keep", "ar_1", "--keep", "ar_4:0")
    document = run("fuse", "g.pb", *options, "--json").json
    assert document["single"] == [{"name": name, "graph": "", "reason": "kept"} for name in ("ar_1", "ar_4")]
    after = {node.name: node for node in read_graph("out.pb").graph_def.node}
    for name in ("ar_1", "ar_4"):
        assert after[name] == before[name]
    assert len(ops("out.pb", "HcomAllReduce")) == 3
    assert run("fuse", "g.pb", *options).out.startswith("g.pb: 4 of 6 all-reduces became 1; 2 stay as they are\n")


def test_overwrite(run):
    path = write("g.pb", equal_graph())
    before = Path(path).read_bytes()
    ran = run("fuse", path, "-o", "./g.pb", code=2)
    assert "--overwrite" in ran.err
    assert Path(path).read_bytes() == before
    run("fuse", path, "-o", path, "--overwrite", "--single")
    assert len(ops(path, "HcomAllReduce")) == 1
    assert os.listdir() == ["g.pb"]


def test_gzip_by_name_and_text_by_content(run):
    from google.protobuf import text_format

    Path("g.pbtxt").write_text(text_format.MessageToString(equal_graph()), encoding="utf-8")
    run("fuse", "g.pbtxt", "--single", "-o", "out.pbtxt.gz")
    text = gzip.decompress(Path("out.pbtxt.gz").read_bytes()).decode()
    assert text.startswith("node {")
    assert text.count('op: "HcomAllReduce"') == 1


# ------------------------------------------------------------------------------------------------ verify


@pytest.fixture
def fused(run):
    write("g.pb", equal_graph(3, 4))
    run("fuse", "g.pb", "-q", "-o", "out.pb")
    return "g.pb", "out.pb"


def test_verify_equal(run, fused):
    ran = run("verify", *fused, "--json")
    assert tuple(ran.json)[:4] == VERIFY_KEYS
    assert set(ran.json) - set(VERIFY_KEYS) == {"structure", "notes"}
    assert (ran.json["schema_version"], ran.json["equal"], ran.json["ranks"]) == (1, True, 2)
    assert {tuple(output) for output in ran.json["outputs"]} == {OUTPUT_KEYS}
    names = [output["name"] for output in ran.json["outputs"]]
    assert {"ar_0", "ar_1", "ar_2", "ar_0/out"} <= set(names)
    assert all(output["bit_equal"] and output["max_abs_diff"] == 0 for output in ran.json["outputs"])
    text = run("verify", *fused)
    count = len(names)
    assert text.out == f"equal: {count} of {count} outputs are bit-equal on 2 ranks\n"
    assert (ran.err, text.err) == ("", "")


def unreduced(names: set[str]) -> GraphDef:
    """The graph of `fused` with some all-reduces left out."""
    graph_def = equal_graph(3, 4)
    for name in names:
        node = node_of(graph_def, name)
        node.op = "Identity"
        for attr in ("reduction", "group", "fusion", "fusion_id"):
            del node.attr[attr]
    return graph_def


def test_verify_not_equal(run, fused):
    write("wrong.pb", unreduced({"ar_1"}))
    ran = run("verify", fused[0], "wrong.pb", "--json", code=1)
    assert ran.json["equal"] is False
    different = {output["name"]: output["max_abs_diff"] for output in ran.json["outputs"] if not output["bit_equal"]}
    assert set(different) == {"ar_1", "ar_1/out"}
    assert min(different.values()) > 0
    assert len(ran.json["structure"]) == 1
    text = run("verify", fused[0], "wrong.pb", code=1).out
    assert f"structure: {ran.json['structure'][0]}\n" in text
    assert sorted(row[0] for row in table_rows(text, "output", "largest")) == ["ar_1", "ar_1/out"]
    count = len(ran.json["outputs"])
    verdict = f"NOT equal: {count - 2} of {count} outputs are bit-equal on 2 ranks, the structure has 1 finding"
    assert text.splitlines()[-1] == verdict


def test_verify_graphs_with_nothing_alike(run, fused):
    nodes = Nodes()
    nodes.gradient("other", (2,))
    write("other.pb", nodes.graph_def)
    ran = run("verify", fused[0], "other.pb", "--json", code=1)
    assert ran.json["equal"] is False
    assert [output["max_abs_diff"] for output in ran.json["outputs"]] == [None] * 3
    findings = ran.json["structure"]
    assert len(findings) == 9
    lines = run("verify", fused[0], "other.pb", code=1).out.splitlines()
    shown = [f"structure: {finding}" for finding in findings[:5]]
    assert lines[:6] == [*shown, "structure: and 4 more"]


def test_verify_options(run, fused):
    np.savez("feeds.npz", **{"ar_0/g:0": np.full(4, 2, np.float32)})
    options = ("--fetch", "ar_0/g", "--feeds", "feeds.npz", "--steps", "2", "--seed", "7", "-n", "3")
    ran = run("verify", *fused, *options, "--json")
    assert (ran.json["equal"], ran.json["ranks"]) == (True, 3)
    assert "ar_0/g" in {output["name"] for output in ran.json["outputs"]}


# ------------------------------------------------------------------------------------------------ streams


def test_stdout_has_the_result_only_and_quiet_has_no_log(run):
    write("g.pb", equal_graph())
    loud, quiet = (run("plan", "g.pb", "--idx", "1,5", *options) for options in ((), ("-q",)))
    assert loud.out == quiet.out
    assert loud.err.startswith("INFO hccl_fusion: gradient segment result: segment num: 2, ")
    assert quiet.err == run("plan", "g.pb", "--idx", "1,5", "--quiet").err == ""
    assert run("list", "g.pb", "--idx", "1,5").err == ""
    assert run("fuse", "g.pb", "-o", "out.pb", "-q").err == ""


def test_a_size_list_that_hccl_would_refuse_is_a_warning_on_stderr(run):
    write("g.pb", equal_graph())
    ran = run("plan", "g.pb", "--size", "11.1,22.2,33.3,33.4", "--json")
    warnings = [line for line in ran.err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert "HCCL would refuse the size list [11.1,22.2,33.3,33.4]" in warnings[0]
    assert ran.json["sections"][0]["strategy"] == "size"
    assert "HCCL would refuse" in run("list", "g.pb", "--size", "11.1,22.2,33.3,33.4").err
    assert run("plan", "g.pb", "--size", "11.1,22.2,33.3,33.4", "-q").err == ""
    assert "warning" not in run("plan", "g.pb", "--size", "60,20,20").err


def shell(*args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The installed command in a process of its own."""
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run([SCRIPT, *args], capture_output=True, check=False, env=environment, **options)


def test_smoke_two_commands_in_a_pipe(run):
    write("g.pb", equal_graph())
    written = shell("fuse", "-", "--idx", "1,5", "-o", "-", input=Path("g.pb").read_bytes())
    assert written.returncode == 0
    run("fuse", "g.pb", "--idx", "1,5", "-o", "out.pb")
    assert written.stdout == Path("out.pb").read_bytes()
    assert written.stderr.decode().splitlines()[1:] == [
        "-: 6 of 6 all-reduces became 2; 0 stay as they are",
        f"  {WORLD} float32 sum: [0,1] [2,5]",
        "verified, written to -",
    ]
    read = shell("list", "-", "--json", input=written.stdout)
    rows = json.loads(read.stdout)["gradients"]
    assert (read.returncode, read.stderr) == (0, b"")
    assert [row["reason"] for row in rows] == ["fusion=0"] * 2
    quiet = shell("fuse", "-", "-o", "-", "-q", input=gzip.compress(written.stdout))
    assert (quiet.returncode, quiet.stderr) == (0, b"")
    assert gzip.decompress(quiet.stdout) == written.stdout


def test_smoke_as_a_module(run):
    write("g.pb", equal_graph())
    code = [sys.executable, "-m", "hccl_fusion", "plan", "g.pb", "--json"]
    ran = subprocess.run(code, capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert json.loads(ran.stdout) == run("plan", "g.pb", "--json").json
    assert ran.stderr.startswith("INFO hccl_fusion: ")


def test_smoke_exit_code_and_table_of_the_installed_command(run):
    write("g.pb", equal_graph())
    ran = shell("list", "g.pb")
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.decode() == run("list", "g.pb").out
    assert shell("list", "missing.pb").returncode == 2


def test_a_reader_that_has_seen_enough_is_no_error():
    write("g.pb", equal_graph())
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as gone:
        ran = subprocess.run([SCRIPT, "list", "g.pb"], stdout=gone, stderr=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_a_stdout_that_cannot_be_written_is_an_error():
    write("g.pb", equal_graph())
    with open("/dev/full", "wb") as full:
        ran = subprocess.run([SCRIPT, "list", "g.pb"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert ran.returncode == 2
    assert ran.stderr.decode().startswith("error: cannot read or write, stdout, found ")
    assert len(ran.stderr.splitlines()) == 1


def test_closed_streams():
    write("g.pb", equal_graph())
    line = f"exec {shlex.quote(SCRIPT)}"
    without_stdin = subprocess.run(f"{line} list - <&-", shell=True, capture_output=True, text=True, check=False)
    assert without_stdin.returncode == 2
    assert without_stdin.stderr.startswith("error: the file is empty, -, ")
    without_output = subprocess.run(f"{line} list g.pb >&- 2>&-", shell=True, check=False)
    assert without_output.returncode == 0


def test_a_pipe_can_be_named_as_the_output(run):
    write("g.pb", equal_graph())
    ran = shell("fuse", "g.pb", "-o", "/dev/stderr")
    run("fuse", "g.pb", "-o", "out.pb")
    assert ran.returncode == 0
    assert ran.stderr.endswith(Path("out.pb").read_bytes())


def test_names_that_the_terminal_cannot_show():
    name = os.fsdecode(b"g\xff\xc3\xbc.pb")
    write(name, equal_graph())
    ran = shell("fuse", name, "-o", "out.pb", env={"PYTHONIOENCODING": "latin-1"})
    assert (ran.returncode, ran.stdout[:2]) == (0, b"g\\")
    nodes = Nodes()
    for number in range(2):
        nodes.gradient(f"ar_{number}", (2,), group="gruppe-ü-√")
    write("g.pb", nodes.graph_def)
    for options in ((), ("--json",)):
        ran = shell("list", "g.pb", *options, env={"PYTHONIOENCODING": "latin-1"})
        assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout)["gradients"][0]["section"].startswith("gruppe-ü-√ ")


# ------------------------------------------------------------------------------------------------ help and start-up


def test_version(run):
    assert run("--version").out == f"hccl-fusion, version {hccl_fusion.__version__}\n"


def test_help_of_the_whole(run):
    ran = run("-h")
    assert ran.out == run("--help").out
    for command in COMMANDS:
        assert re.search(rf"^  {command} +[A-Z][^.]+\.$", ran.out, re.MULTILINE), command
    bare = run(code=2)
    assert (bare.out, bare.err) == ("", ran.out)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(run, command):
    ran = run(command, "-h")
    assert ran.out == run(command, "--help").out
    assert ran.err == ""
    assert ran.out.startswith(f"Usage: hccl-fusion {command} ")
    assert "--json" in ran.out
    assert example(ran.out)[0] == command
    options = [line for line in ran.out.splitlines() if re.match("  -", line)]
    assert len(options) >= 5
    text = ran.out.partition("Options:")[2]
    for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE):
        described = re.search(rf"{option}\b[^\n]*?(?:  |\n {{10,}})\S", text)
        assert described, f"{option} has no help"


def example(help_text: str) -> list[str]:
    """The words of the Example line, without the command's own name."""
    (line,) = (line for line in help_text.splitlines() if line.strip().startswith("Example: "))
    words = shlex.split(line.strip()[len("Example: ") :])
    assert words[0] == "hccl-fusion"
    return words[1:]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "demo"])  # test_demo.py runs that
def test_the_example_of_a_command_runs(run, command):
    write("resnet50.pb", gradients_graph(*[(count % 7 + 1,) for count in range(161)]))
    words = example(run(command, "-h").out)
    if command == "verify":
        run("fuse", "resnet50.pb", "-o", "fused.pb", "-q")
    ran = run(*words)
    assert ran.out
    if command == "fuse":
        assert Path("fused.pb").exists()


_PROBE = """
import sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("tensorflow.python") or name in {heavy}:
            raise AssertionError(f"{{name}} is imported")

sys.meta_path.insert(0, Watch())
import hccl_fusion
for arguments in {commands}:
    from hccl_fusion.cli import main
    assert main(arguments) == 0, arguments
loaded = [name for name in sys.modules if name == "tensorflow" or name.startswith("tensorflow.python")]
assert not loaded, loaded
"""


def probe(commands: list[list[str]], *heavy: str) -> None:
    code = _PROBE.format(commands=commands, heavy=set(heavy) or "()")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_no_command_on_a_graph_loads_tensorflows_runtime():
    write("g.pb", equal_graph())
    probe([
        ["list", "g.pb"],
        ["plan", "g.pb", "--idx", "1,5", "-o", "p.json"],
        ["fuse", "g.pb", "--plan", "p.json", "-o", "out.pb"],
        ["fuse", "g.pb", "--emit", "mock", "--ranks", "2", "-o", "mock.pb", "--json"],
    ])  # fmt: skip


def test_start_up_loads_no_more_than_it_needs():
    probe([["--version"], ["--help"]], "rich")
    probe([], "click", "rich", "numpy", "google.protobuf")


def test_the_completion_script_of_bash():
    ran = shell(env={"_HCCL_FUSION_COMPLETE": "bash_source"})
    assert ran.returncode == 0
    assert b"_HCCL_FUSION_COMPLETE=bash_complete" in ran.stdout
    assert re.search(rb"complete .*hccl-fusion", ran.stdout)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", [f"plain,{command}" for command in cli.list_commands(click.Context(cli))]),
        ("ver", ["plain,verify"]),
        ("fuse --em", ["plain,--emit"]),
        ("fuse --emit f", ["plain,fused", "plain,fusion-id"]),
        ("list resn", ["file,resn"]),
        ("plan --plan p", ["file,p"]),
        ("verify a.pb b", ["file,b"]),
        ("demo -o x", ["dir,x"]),
    ],
)
def test_completions(capsys, monkeypatch, typed, expected):
    words = f"hccl-fusion {typed}"
    monkeypatch.setenv("_HCCL_FUSION_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == expected


# ------------------------------------------------------------------------------------------------ progress


def reading_stdin(stderr: Any, *options: str) -> subprocess.Popen[bytes]:
    """`list -`, which waits for its graph."""
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    return subprocess.Popen(
        [SCRIPT, "list", "-", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
    )


def read_terminal(descriptor: int, until: bytes | None = None) -> bytes:
    """What was written to a terminal: until it is closed, or until a text is there."""
    seen = b""
    while until is None or until not in seen:
        ready, _, _ = select.select([descriptor], [], [], 60)
        assert ready, f"nothing more came, only {seen!r}"
        try:
            read = os.read(descriptor, 65536)
        except OSError:  # Linux: the other side is closed
            return seen
        if not read:
            return seen
        seen += read
    return seen


def test_a_bar_for_work_over_a_second_on_a_terminal_only():
    content = equal_graph().SerializeToString()
    ours, theirs = pty.openpty()
    quiet_ours, quiet_theirs = pty.openpty()
    with contextlib.ExitStack() as stack:
        piped = stack.enter_context(reading_stdin(subprocess.PIPE))
        quiet = stack.enter_context(reading_stdin(quiet_theirs, "-q"))
        shown = stack.enter_context(reading_stdin(theirs))
        os.close(theirs)
        os.close(quiet_theirs)
        # All three wait for their graph; the bar is there when the second is over.
        seen = read_terminal(ours, until=b"reading the graph")
        for process in (piped, quiet, shown):
            process.stdin.write(content)
            process.stdin.close()
        outputs = [process.stdout.read() for process in (piped, quiet, shown)]
        errors = piped.stderr.read()
        seen += read_terminal(ours)
        quiet_seen = read_terminal(quiet_ours)
        codes = [process.wait() for process in (piped, quiet, shown)]
    os.close(ours)
    os.close(quiet_ours)
    assert codes == [0, 0, 0]
    assert errors == quiet_seen == b""
    assert outputs[0] == outputs[1] == outputs[2]
    assert b"reading" not in outputs[0]
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l"), "the cursor is shown again"


def test_a_bar_that_comes_too_late_does_not_come(capsys):
    progress = Progress(3, quiet=False)
    with progress:
        progress.step("all is done")
    progress._show()
    assert progress._bar is None
    assert capsys.readouterr().err == ""
