"""The README's first command: run twice, each in an empty folder of its own, once for people and once for machines."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from graph_passes.files import read_graph
from hccl_fusion.cli.demo_command import command
from hccl_fusion.plan_file import read_plan

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "hccl-fusion")
FILES = ["fused-by-idx.pb", "fused-default.pb", "plan-by-idx.json", "plan-default.json", "resnet50.pb"]
SEGMENTS = {"default": [[0, 108], [109, 160]], "by-idx": [[0, 86], [87, 160]]}


@dataclass(frozen=True)
class Demo:
    """What one run left behind."""

    folder: Path
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """The example of the help text, and a run for machines; both at the same time."""
    example = shlex.split(re.search("Example: hccl-fusion (.*)", command.help)[1])
    options = {"text": example, "json": ["demo", "--json", "-q", "-o", "there/it is"]}
    with contextlib.ExitStack() as stack:
        running = {}
        for name, words in options.items():
            folder = tmp_path_factory.mktemp(name)
            process = subprocess.Popen(
                [SCRIPT, *words], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            running[name] = folder, stack.enter_context(process)
        done = {name: (folder, process, *process.communicate()) for name, (folder, process) in running.items()}
    return {name: Demo(folder, process.returncode, out, err) for name, (folder, process, out, err) in done.items()}


@pytest.fixture(scope="module")
def document(demos) -> dict[str, Any]:
    assert demos["json"].code == 0, demos["json"].err
    found: dict[str, Any] = json.loads(demos["json"].out)
    return found


def test_json(document):
    assert tuple(document) == ("schema_version", "graph", "nodes", "gradients", "ranks", "equal", "plans")
    assert document["schema_version"] == 1
    assert (document["equal"], document["gradients"], document["ranks"]) == (True, 161, 2)
    assert document["graph"] == "there/it is/resnet50.pb"
    assert {plan["name"]: plan["segments"] for plan in document["plans"]} == SEGMENTS
    for plan in document["plans"]:
        assert tuple(plan) == ("name", "path", "segments", "equal", "bit_equal_outputs", "outputs")
        assert plan["equal"] is True
        assert plan["bit_equal_outputs"] == plan["outputs"] > 161


def test_quiet_leaves_stderr_empty(demos):
    assert demos["json"].err == ""


@pytest.mark.parametrize(("name", "folder"), [("text", "hccl-fusion-demo"), ("json", "there/it is")])
def test_the_files_are_there(demos, name, folder):
    written = demos[name].folder / folder
    assert sorted(path.name for path in written.iterdir()) == FILES
    assert [path.name for path in demos[name].folder.iterdir()] == [folder.split("/")[0]]
    for plan, segments in SEGMENTS.items():
        (section,) = json.loads((written / f"plan-{plan}.json").read_text(encoding="utf-8"))["sections"]
        assert section["segments"] == segments
        assert read_plan(str(written / f"plan-{plan}.json")).sections
        fused = read_graph(str(written / f"fused-{plan}.pb")).graph_def
        assert sum(node.op == "HcomAllReduce" for node in fused.node) == len(segments)


def test_both_runs_write_the_same_graphs(demos):
    texts, machines = (demos[n].folder / f for n, f in (("text", "hccl-fusion-demo"), ("json", "there/it is")))
    for name in FILES:
        assert (texts / name).read_bytes() == (machines / name).read_bytes(), name


def test_text_says_what_the_json_says(demos, document):
    ran = demos["text"]
    assert ran.code == 0, ran.err
    first, *_, verdict, following = ran.out.splitlines()
    assert first == f"hccl-fusion-demo/resnet50.pb: {document['nodes']:,} nodes, 161 gradients, 97.5 MiB"
    assert verdict == "Both fused graphs compute the same as the original."
    assert following == "Next: hccl-fusion list hccl-fusion-demo/resnet50.pb"
    for plan in document["plans"]:
        segments = " ".join(f"[{first},{last}]" for first, last in plan["segments"])
        outputs = plan["outputs"]
        row = rf"^ {plan['name']} +{re.escape(segments)} +161 became 2 +{outputs} of {outputs} "
        assert re.search(row, ran.out, re.MULTILINE), row
    assert re.search(r"^ +0 +resnet50/fc/bias +1001 +4004$", ran.out, re.MULTILINE)


def test_progress_and_log_go_to_stderr(demos):
    lines = demos["text"].err.splitlines()
    told = [line for line in lines if line.startswith("… ")]
    assert told[0] == "… loading TensorFlow"
    assert "… running the original and the fused graph on 2 in-process ranks" in told
    logged = [line for line in lines if line not in told]
    assert {line.split(": ")[0] for line in logged} == {"INFO hccl_fusion"}
    assert "segment result" not in demos["text"].out
