"""What the command line refuses: one line that says what, where and what to do; exit code 2; nothing left behind."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import FLOAT, Nodes, Streams, Type, gradients_graph, node_of, saved_model
from google.protobuf import text_format

from graph_passes.messages import GraphDef
from hccl_fusion.cli import main

COMMANDS = {
    "list": ("list", "{graph}"),
    "plan": ("plan", "{graph}", "-o", "out"),
    "fuse": ("fuse", "{graph}", "-o", "out", "--plan-out", "plan"),
    "verify": ("verify", "{graph}", "good.pb"),
}


def content(graph_def: GraphDef) -> bytes:
    return graph_def.SerializeToString(deterministic=True)


def good() -> GraphDef:
    return gradients_graph(*[(100,)] * 6)


def changed(change: Callable[[Any], object]) -> bytes:
    """A good graph with its node `ar_2` changed."""
    graph_def = good()
    change(node_of(graph_def, "ar_2"))
    return content(graph_def)


def cyclic() -> bytes:
    nodes = Nodes()
    nodes.placeholder("x", (2,))
    nodes.add_n("a", "x", "b")
    nodes.identity("b", "a")
    nodes.all_reduce("ar", "b")
    return content(nodes.graph_def)


def with_attr(name: str, **value: Any) -> bytes:
    def change(node: Any) -> None:
        node.attr[name].Clear()
        for kind, set_to in value.items():
            setattr(node.attr[name], kind, set_to)

    return changed(change)


def without_attr(name: str) -> bytes:
    return changed(lambda node: node.attr.pop(name))


def two_meta_graphs() -> bytes:
    model = saved_model()
    del model.meta_graphs[1].meta_info_def.tags[:]
    return model.SerializeToString(deterministic=True)


def dangling(count: int) -> bytes:
    graph_def = good()
    for number in range(count):
        node_of(graph_def, f"ar_{number}").input[0] = f"gone_{number}"
    return content(graph_def)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK_SIZE", raising=False)


@pytest.fixture
def refuse(capsys):
    """Runs a command that must be refused; returns the line."""

    def call(*args: str) -> str:
        capsys.readouterr()
        before = everything()
        code = main(list(args))
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert (code, captured.out, len(errors)) == (2, "", 1), captured
        assert lines[-1] == errors[0]
        assert "Traceback" not in captured.err
        assert everything() == before, "files were changed or left behind"
        return errors[0]

    return call


def everything() -> dict[str, bytes]:
    """All files of the folder, hidden ones too."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(Path().rglob("*"))}


# ------------------------------------------------------------------------------------------------ graphs


@dataclass(frozen=True)
class Bad:
    """A file, and what must stand in the error: words in this order."""

    content: bytes
    words: tuple[str, ...]
    remedy: str = "; try "
    commands: tuple[str, ...] = tuple(COMMANDS)


_TYPO = b'node {\n  name: "a"\n  opp: "Const"\n}\n'
_READ = ("list", "plan", "fuse")  # verify takes any sound graph
GRAPHS = {
    "empty": Bad(b"", ("the file is empty", "bad", "found 0 bytes", "expected a GraphDef")),
    "blanks": Bad(b" \n\n", ("the file is empty", "bad", "found 3 bytes")),
    "truncated": Bad(content(good())[:-7], ("cut short", "bad, byte ", f" of {len(content(good())) - 7}")),
    "truncated gzip": Bad(gzip.compress(content(good()))[:-9], ("gzip", "cut short", "bad")),
    "damaged gzip": Bad(gzip.compress(b"x" * 99)[:20] + b"\0" * 30, ("gzip", "damaged", "bad")),
    "png": Bad(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ("no graph", "bad", "found a PNG image", "expected a GraphDef")),
    "prose": Bad(b"Dear reader,\n", ("no graph", "bad", "Dear reader")),
    "typo": Bad(_TYPO, ("does not parse", "bad, line 3, column 3", "opp")),
    "typo in a compressed text": Bad(gzip.compress(_TYPO), ("does not parse", "bad, line 3, column 3")),
    "text cut short": Bad(b'node {\n  name: "a"\n', ("does not parse", "bad, line 2")),
    "no node": Bad(b"versions { producer: 1 }\n", ("no node", "bad", "0 nodes")),
    "no meta graph to choose": Bad(two_meta_graphs(), ("meta graph", "bad", "2 meta graphs, none tagged train")),
    "duplicate names": Bad(
        changed(lambda node: setattr(node, "name", "ar_1")),
        ("not unique", "bad, node ar_1", "found ar_1 more than once"),
    ),
    "dangling input": Bad(dangling(1), ("names no node", "bad, node ar_0", "node ar_0 <- gone_0")),
    "seven dangling inputs": Bad(
        dangling(6), ("names no node", "bad, node ar_0", "node ar_4 <- gone_4; and 1 more", "expected the name")
    ),
    "unreadable input": Bad(
        changed(lambda node: node.input.append("x:y:z:1")), ("cannot be read", "bad, node ar_2", "'x:y:z:1'")
    ),
    "cycle": Bad(cyclic(), ("has a cycle", "bad, node b", "found b -> a -> b", "expected an acyclic graph")),
    "no all-reduce": Bad(
        content(GraphDef(node=[Nodes().graph_def.node.add(name="a", op="NoOp")])),
        ("no all-reduce", "bad", "found 1 node", "HcomAllReduce"),
    ),
    "attribute of the wrong type": Bad(with_attr("fusion", s=b"1"), ("fusion", "bad, node ar_2")),
    "type as text": Bad(with_attr("T", s=b"float"), ("T", "bad, node ar_2")),
    "group no text": Bad(with_attr("group", i=3), ("group", "bad, node ar_2")),
    "missing group": Bad(without_attr("group"), ("group", "bad, node ar_2")),
    "empty group": Bad(with_attr("group", s=b""), ("group", "bad, node ar_2")),
    "missing reduction": Bad(without_attr("reduction"), ("reduction", "bad, node ar_2")),
    "fusion 3": Bad(with_attr("fusion", i=3), ("fusion", "bad, node ar_2", "found fusion 3"), commands=_READ),
    "fusion 1 with an id": Bad(with_attr("fusion_id", i=7), ("fusion", "bad, node ar_2", "7"), commands=_READ),
    "string gradient": Bad(with_attr("T", type=7), ("cannot be reduced", "bad, node ar_2", "found string")),
    "two inputs": Bad(
        changed(lambda node: node.input.append("ar_0/g")), ("wrong number of inputs", "bad, node ar_2", "expected one")
    ),
}


@pytest.mark.parametrize(
    ("command", "bad"),
    [(command, bad) for bad in GRAPHS.values() for command in bad.commands],
    ids=[f"{command}-{name}" for name, bad in GRAPHS.items() for command in bad.commands],
)
def test_a_bad_graph(refuse, command, bad):
    Path("bad").write_bytes(bad.content)
    Path("good.pb").write_bytes(content(good()))
    args = [word.format(graph="bad") for word in COMMANDS[command]]
    line = refuse(*args)
    assert_words(line, bad.words)
    assert bad.remedy in line
    if command != "verify":
        # The same from a pipe; the place is then stdin.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdin", Streams(bad.content))
            assert_words(
                refuse(*[word.replace("bad", "-") for word in args]), [w.replace("bad", "-") for w in bad.words]
            )


def assert_words(line: str, words: Any) -> None:
    """All words stand in the line, in this order."""
    at = 0
    for word in words:
        found = line.find(word, at)
        assert found >= 0, f"{word!r} is not in {line[at:]!r}"
        at = found + len(word)


def test_the_second_graph_of_verify_is_named_too(refuse):
    Path("good.pb").write_bytes(content(good()))
    for name, words in {"cycle": ("cycle", "bad.pb, node b"), "png": ("no graph", "bad.pb", "PNG")}.items():
        Path("bad.pb").write_bytes(GRAPHS[name].content)
        line = refuse("verify", "good.pb", "bad.pb")
        assert_words(line, words)
        assert "good.pb" not in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_graph_and_a_folder_that_is_none(refuse, command):
    Path("good.pb").write_bytes(content(good()))
    Path("folder").mkdir()
    words = COMMANDS[command]
    missing = refuse(*[word.format(graph="nowhere/g.pb") for word in words])
    assert_words(missing, ("cannot read the file", "nowhere/g.pb", "No such file", "; try "))
    folder = refuse(*[word.format(graph="folder") for word in words])
    assert_words(folder, ("no SavedModel", "folder", "saved_model.pb", "; try "))


# ------------------------------------------------------------------------------------------------ options


@dataclass(frozen=True)
class Slip:
    """Options that are refused for a graph of 6 gradients, and what must stand in the error."""

    args: str
    words: tuple[str, ...]
    remedy: str = ""
    environment: dict[str, str] = field(default_factory=dict)


_NINE = "0,1,2,3,4,5,6,7,8"
STRATEGIES = {
    "nine indices": Slip(f"--idx {_NINE}", ("too many segments", "--idx", "found 9", "expected at most 8")),
    "nine sizes": Slip(f"--size {'10,' * 8}20", ("too many segments", "--size", "found 9", "expected at most 8")),
    "not ascending": Slip("--idx 3,1,5", ("ascending", "--idx", "positions 0 and 1", "3 before 1"), "[1,3,5]"),
    "an index twice": Slip("--idx 3,3,5", ("ascending", "--idx", "3 before 3"), "without repeats"),
    "an index below 0": Slip("--idx -1,5", ("malformed", "--idx", "position 0", "'-1'"), "20,100,159"),
    "no index": Slip("--idx 1,x,5", ("malformed", "--idx", "position 1", "'x'"), "20,100,159"),
    "an index with a point": Slip("--idx 1.0,5", ("malformed", "--idx", "position 0", "'1.0'"), "20,100,159"),
    "an index out of range": Slip("--idx 1,4294967296", ("no gradient index", "--idx", "position 1", "4294967296")),
    "an empty list": Slip("--idx=", ("malformed", "--idx", "position 0", "''"), "20,100,159"),
    "the last index too small": Slip(
        "--idx 1,4", ("last gradient", "g.pb", "6 gradients", "found [1,4]", "expected the last index to be 5"), "[1,5]"
    ),
    "the last index too large": Slip(
        "--idx 1,7", ("last gradient", "g.pb", "found [1,7]", "expected the last index to be 5"), "[1,5]"
    ),
    "sizes below 100": Slip("--size 60,20", ("add to 100", "--size", "found 80 from [60,20]", "expected")),
    "sizes above 100": Slip("--size 60,40.5", ("add to 100", "--size", "found 100.5 from [60,40.5]", "expected")),
    "NaN": Slip("--size nan,100", ("malformed", "--size", "position 0", "'nan'"), "60,20,20"),
    "infinite": Slip("--size 50,inf", ("malformed", "--size", "position 1", "'inf'"), "60,20,20"),
    "a negative size": Slip("--size -10,110", ("malformed", "--size", "position 0", "'-10'"), "60,20,20"),
    "a size over 100": Slip("--size 0,101", ("no percentage", "--size", "position 1", "101", "from 0 to 100")),
    "no segments": Slip("--segments 0", ("--segments", "0", "1 or more")),
    "segments no number": Slip("--segments two", ("--segments", "'two'"), "--help"),
    "no bytes": Slip("--max-bytes 0", ("--max-bytes", "0", "1 or more")),
    "an unknown unit": Slip("--max-bytes 25XB", ("--max-bytes", "'25XB'", "expected", "25MiB")),
    "half a byte": Slip("--max-bytes 0.5B", ("--max-bytes", "'0.5B'", "expected", "whole number of bytes")),
    "two strategies": Slip("--idx 1,5 --single", ("exclude each other", "--idx and --single", "expected one")),
    "three strategies": Slip("--size 1,99 --none --segments 2", ("--size", "--segments", "--none", "expected one")),
    "a wrong group": Slip(
        "--group mine", ("no gradient", "g.pb, group mine", "found groups hccl_world_group"), "--group hccl_world_group"
    ),
    "an empty group": Slip("--group=", ("group's name", "--group", "found 0 bytes", "1 to 127")),
    "a long group": Slip(f"--group {'g' * 128}", ("group's name", "--group", "found 128 bytes", "1 to 127")),
    "an unknown shape mode": Slip("--shape-mode no", ("--shape-mode", "'no'", "known"), "--help"),
    "a buffer of nothing": Slip("--buffer-mib 1", ("--buffer-mib", "1", "x>=2"), "--help"),
    "an unknown accounting": Slip("--size-accounting no", ("--size-accounting", "'no'", "padded"), "--help"),
    "an unknown option": Slip("--indices 1,5", ("no such option", "--indices", "hccl-fusion {command}"), "--help"),
    "a misspelt option": Slip("--segment 2", ("no such option", "--segment"), "--segments"),
    "an option without its value": Slip("--idx", ("--idx", "argument"), "--help"),
    "another argument": Slip("h.pb", ("argument", "h.pb", "hccl-fusion {command}"), "--help"),
    "a missing plan file": Slip("--plan none.json", ("plan file", "--plan", "none.json", "No such file"), "making"),
    "an empty plan file": Slip("--plan empty.json", ("no JSON", "empty.json", "line 1 column 1"), "making"),
    "a broken plan file": Slip("--plan broken.json", ("no JSON", "broken.json", "line 2 column 1"), "making"),
    "a graph as the plan file": Slip("--plan g.pb", ("plan file", "g.pb"), "making"),
    "a list as the plan file": Slip("--plan list.json", ("another schema", "list.json", "found", "list"), "making"),
    "a plan of tomorrow": Slip("--plan tomorrow.json", ("another schema", "tomorrow.json", "2"), "making"),
    "a plan with gaps": Slip("--plan gaps.json", ("do not follow", "gaps.json, section 0", "[3, 5]"), "making"),
    "a short plan": Slip("--plan short.json", ("do not cover", "short.json, section 0", "5 of 6"), "making"),
    "a plan without names": Slip("--plan names.json", ("gradients", "names.json, section 0"), "making"),
    "a plan without bytes": Slip("--plan bytes.json", ("bytes", "bytes.json, section 0"), "making"),
    "a plan of another graph": Slip(
        "--plan other.json", ("another graph", "g.pb, other.json", "found", "expected gradients of"), "this graph"
    ),
}


@pytest.fixture
def slips(capsys):
    """The files that the slips name."""
    Path("g.pb").write_bytes(content(good()))
    assert main(["plan", "g.pb", "--idx", "1,5", "-o", "plan.json", "-q"]) == 0
    plan = json.loads(Path("plan.json").read_text(encoding="utf-8"))

    def write(name: str, **keys: Any) -> None:
        section = {**plan["sections"][0], **keys}
        section = {key: value for key, value in section.items() if value is not None}
        Path(name).write_text(json.dumps({**plan, "sections": [section]}), encoding="utf-8")

    Path("empty.json").write_text("", encoding="utf-8")
    Path("broken.json").write_text('{"schema_version": 1,\n', encoding="utf-8")
    Path("list.json").write_text("[]", encoding="utf-8")
    Path("tomorrow.json").write_text(json.dumps({**plan, "schema_version": 2}), encoding="utf-8")
    write("gaps.json", segments=[[0, 1], [3, 5]])
    write("short.json", segments=[[0, 1], [2, 4]])
    write("names.json", gradients=None)
    write("bytes.json", bytes=[1, 2])
    write("other.json", gradients=[f"other_{number}" for number in range(6)])
    capsys.readouterr()


@pytest.mark.usefixtures("slips")
@pytest.mark.parametrize("command", ["list", "plan", "fuse"])
@pytest.mark.parametrize("slip", STRATEGIES.values(), ids=STRATEGIES)
def test_a_slip_in_the_strategy(refuse, command, slip):
    first = [word.format(graph="g.pb") for word in COMMANDS[command]]
    line = refuse(*first, *slip.args.split())
    assert_words(line, [word.format(command=command) for word in slip.words])
    assert slip.remedy in line.partition("; try ")[2]


FUSE = {
    "no output": Slip("g.pb", ("missing option", "--output", "hccl-fusion fuse"), "--help"),
    "no graph": Slip("-o out", ("missing argument", "GRAPH", "hccl-fusion fuse"), "--help"),
    "output is the input": Slip("g.pb -o g.pb", ("overwrite the input", "g.pb", "same file"), "--overwrite"),
    "output is the input by another name": Slip("g.pb -o link.pb", ("overwrite the input", "link.pb"), "--overwrite"),
    "output folder is missing": Slip("g.pb -o no/such/out", ("folder", "--output no/such/out"), "mkdir -p no/such"),
    "output folder is a file": Slip("g.pb -o g.pb/out", ("cannot be written", "--output g.pb/out", "no folder")),
    "output is a folder": Slip("g.pb -o folder", ("is a folder", "--output", "folder", "expected")),
    "output is nameless": Slip("g.pb -o ''", ("no name", "--output", "expected")),
    "output cannot be written": Slip("g.pb -o /dev/full", ("cannot write", "/dev/full", "No space"), "another"),
    "plan folder is missing": Slip("g.pb -o out --plan-out no/p", ("folder", "--plan-out no/p"), "mkdir -p no"),
    "plan is a folder": Slip("g.pb -o out --plan-out folder", ("is a folder", "--plan-out")),
    "plan is the graph": Slip("g.pb -o out --plan-out g.pb", ("overwrite the input", "--plan-out", "g.pb"), "another"),
    "plan is the output": Slip("g.pb -o out --plan-out ./out", ("two results", "--output and --plan-out", "out")),
    "output is the plan file": Slip("g.pb --plan plan.json -o plan.json", ("overwrite", "--output", "plan.json")),
    "plan is part of the input": Slip(
        "model -o out --plan-out model/saved_model.pb", ("overwrite the input", "--plan-out"), "another"
    ),
    "two results on stdout": Slip("g.pb -o - --json", ("one result only", "-o - and --json", "expected one")),
    "plan and JSON on stdout": Slip("g.pb -o out --plan-out - --json", ("one result only", "--plan-out -")),
    "graph and plan on stdout": Slip("g.pb -o - --plan-out -", ("one result only", "--output -", "--plan-out -")),
    "an unknown form": Slip("g.pb -o out --emit npu", ("--emit", "'npu'", "'fusion-id'"), "--help"),
    "no ranks": Slip("g.pb -o out --ranks 0", ("--ranks", "0", "x>=1"), "--help"),
    "ranks no number": Slip("g.pb -o out --ranks all", ("--ranks", "'all'"), "--help"),
    "RANK_SIZE no number": Slip(
        "g.pb -o out --emit mock", ("ranks", "RANK_SIZE", "'abc'", "at least 1"), "--ranks", {"RANK_SIZE": "abc"}
    ),
    "RANK_SIZE of 0": Slip(
        "g.pb -o out --emit collective", ("ranks", "RANK_SIZE", "'0'", "at least 1"), "--ranks", {"RANK_SIZE": "0"}
    ),
    "RANK_SIZE empty": Slip(
        "g.pb -o out --emit mock", ("ranks", "RANK_SIZE", "''", "at least 1"), "--ranks", {"RANK_SIZE": ""}
    ),
    "keep of an unknown node": Slip(
        "g.pb -o out --keep ar_1 --keep ar_9",
        ("no all-reduce", "--keep", "found ar_9", "g.pb"),
        "hccl-fusion list g.pb",
    ),
    "keep of a node that is no all-reduce": Slip("g.pb -o out --keep ar_1/g", ("no all-reduce", "--keep", "ar_1/g")),
}


@pytest.fixture
def model():
    Path("model").mkdir()
    Path("model/saved_model.pb").write_bytes(saved_model().SerializeToString(deterministic=True))


@pytest.mark.usefixtures("slips", "model")
@pytest.mark.parametrize("slip", FUSE.values(), ids=FUSE)
def test_a_slip_in_fuse(refuse, monkeypatch, slip):
    Path("folder").mkdir()
    os.symlink("g.pb", "link.pb")
    for name, value in slip.environment.items():
        monkeypatch.setenv(name, value)
    line = refuse("fuse", *[word.strip("'") for word in slip.args.split()])
    assert_words(line, slip.words)
    assert slip.remedy in line.partition("; try ")[2]


OTHERS = {
    "plan over the graph": Slip("plan g.pb -o g.pb", ("overwrite the input", "--output", "g.pb"), "another path"),
    "plan to a missing folder": Slip("plan g.pb -o no/p.json", ("folder", "--output no/p.json"), "mkdir -p no"),
    "plan to a folder": Slip("plan g.pb -o folder", ("is a folder", "--output", "folder")),
    "plan cannot be written": Slip("plan g.pb -o /dev/full", ("cannot write", "/dev/full", "No space")),
    "calls and JSON": Slip("plan g.pb --hccl-calls --json", ("one result only", "--hccl-calls and --json")),
    "calls and the plan": Slip("plan g.pb --hccl-calls -o -", ("one result only", "--hccl-calls and -o -")),
    "verify one graph": Slip("verify g.pb", ("missing argument", "AFTER", "hccl-fusion verify"), "--help"),
    "verify stdin twice": Slip("verify - -", ("stdin", "BEFORE and AFTER", "twice")),
    "verify on no ranks": Slip("verify g.pb g.pb -n 0", ("--ranks", "0", "x>=1"), "--help"),
    "verify no steps": Slip("verify g.pb g.pb --steps 0", ("--steps", "0", "x>=1"), "--help"),
    "verify a seed of letters": Slip("verify g.pb g.pb --seed x", ("--seed", "'x'"), "--help"),
    "verify missing feeds": Slip("verify g.pb g.pb --feeds no.npz", ("feeds", "--feeds no.npz", "No such file")),
    "verify feeds of another kind": Slip("verify g.pb g.pb --feeds g.pb", ("feeds", "--feeds g.pb", "expected")),
    "verify broken feeds": Slip("verify g.pb g.pb --feeds cut.npz", ("feeds", "--feeds cut.npz", "expected")),
    "verify an unknown tensor": Slip("verify g.pb g.pb --fetch nope", ("no such tensor", "g.pb", "'nope:0'")),
    "demo in a file": Slip("demo -o g.pb", ("folder", "--output g.pb"), "another folder"),
    "demo below a file": Slip("demo -o g.pb/x", ("folder", "--output g.pb/x"), "another folder"),
    "demo of tiny images": Slip("demo --image-size 8", ("--image-size", "8", "x>=32"), "--help"),
    "demo on one rank": Slip("demo -n 1", ("--ranks", "1", "x>=2"), "--help"),
    "an unknown command": Slip("plam g.pb", ("no such command", "plam"), "hccl-fusion --help"),
    "an unknown option of the whole": Slip("--plan", ("no such option", "--plan"), "hccl-fusion --help"),
}


@pytest.mark.usefixtures("slips")
@pytest.mark.parametrize("slip", OTHERS.values(), ids=OTHERS)
def test_a_slip_elsewhere(refuse, slip):
    import numpy as np

    Path("folder").mkdir()
    np.savez_compressed("whole.npz", **{"ar_0/g:0": np.arange(100, dtype=np.float32)})
    whole = Path("whole.npz").read_bytes()
    Path("cut.npz").write_bytes(whole[:60] + b"\xff" * 20 + whole[80:])
    line = refuse(*slip.args.split())
    assert_words(line, slip.words)
    assert slip.remedy in line.partition("; try ")[2]


@pytest.mark.parametrize("command", ["list", "plan", "fuse"])
@pytest.mark.parametrize("given", [b"", b"\n"])
def test_stdin_that_is_empty(refuse, monkeypatch, command, given):
    monkeypatch.setattr("sys.stdin", Streams(given))
    line = refuse(*[word.format(graph="-") for word in COMMANDS[command]])
    assert_words(line, ("the file is empty", "-", f"found {len(given)} bytes", "; try "))


def test_the_160_gradients_of_the_documentation(refuse):
    Path("g.pb").write_bytes(content(gradients_graph(*[(count % 9 + 1,) for count in range(160)])))
    line = refuse("plan", "g.pb", "--idx", "20,100,158")
    assert_words(line, ("g.pb", "160 gradients", "found [20,100,158]", "159", "; try [20,100,159]"))


def test_a_failed_write_keeps_what_was_there(refuse, monkeypatch):
    Path("g.pb").write_bytes(content(good()))
    Path("out").write_bytes(b"as it was")
    Path("plan").write_bytes(b"as it was, too")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert_words(refuse("fuse", "g.pb", "-o", "out", "--plan-out", "plan"), ("cannot write", "out", "No space"))
    assert_words(refuse("plan", "g.pb", "-o", "plan"), ("cannot write", "plan", "No space"))


def test_a_folder_without_permission(refuse, monkeypatch):
    Path("g.pb").write_bytes(content(good()))
    Path("locked").mkdir()
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name != "locked")  # root may write anywhere
    for args in (("plan", "g.pb", "-o", "locked/out"), ("fuse", "g.pb", "-o", "locked/out")):
        assert_words(refuse(*args), ("cannot be written", "--output locked/out", "without write permission", "; try"))


DEBUG = {
    "a graph": ("list", "bad"),
    "an option": ("plan", "g.pb", "--nonsense"),
    "a list": ("plan", "g.pb", "--idx", "3,1"),
    "a pass": ("fuse", "g.pb", "-o", "out", "--idx", "1,4"),
    "verify": ("verify", "g.pb", "bad"),
    "demo": ("demo", "-o", "g.pb"),
}


@pytest.mark.parametrize("args", DEBUG.values(), ids=DEBUG)
def test_debug_shows_the_traceback_as_well(capsys, args):
    Path("g.pb").write_bytes(content(good()))
    Path("bad").write_bytes(b"\x89PNG")
    assert main([*args]) == 2
    plain = capsys.readouterr()
    assert main([*args, "--debug"]) == 2
    shown = capsys.readouterr()
    assert shown.out == plain.out == ""
    trace, error = shown.err.split("error: ")
    assert plain.err.endswith("error: " + error)
    assert "Traceback (most recent call last):" in trace
    assert "Traceback" not in plain.err
    assert re.search(r"^\w[\w.]*(Error|Option): ", trace, re.MULTILINE)


@pytest.mark.parametrize(
    "args", [("list", "g.pb", "-q", "--idx", "3,1"), ("fuse", "none", "-o", "out", "--json", "-q")]
)
def test_an_error_is_said_even_where_quiet_and_in_json_mode(refuse, args):
    Path("g.pb").write_bytes(content(good()))
    refuse(*args)


def test_names_with_line_breaks_stay_on_one_line(refuse):
    assert "no such file.pb" in refuse("list", "no\nsuch\nfile.pb")
    nodes = Nodes()
    nodes.add("a\nb", "NoOp", "gone\nnode", T=Type(FLOAT))
    Path("g.pb").write_bytes(content(nodes.graph_def))
    refuse("plan", "g.pb")


def test_an_interruption_is_one_line(capsys, monkeypatch):
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hccl_fusion.cli.planning.read_graph", interrupt)
    assert main(["list", "g.pb"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.strip()) == ("", "error: interrupted")


def test_a_saved_model_is_not_copied_over_another_folder(refuse):
    for name in ("model", "there"):
        Path(name).mkdir()
        Path(name, "saved_model.pb").write_bytes(saved_model().SerializeToString(deterministic=True))
    assert_words(refuse("fuse", "model", "-o", "there"), ("cannot write", "there", "exists"))
    assert_words(refuse("fuse", "model", "-o", "model"), ("overwrite the input", "model", "--overwrite"))
    assert_words(refuse("fuse", "model", "-o", "model/inner"), ("cannot write", "model/inner", "inside"))


def test_text_format_parses_what_was_meant():
    """The typo of the table is the only fault of that text."""
    text_format.Parse(_TYPO.replace(b"opp", b"op").decode(), GraphDef())
