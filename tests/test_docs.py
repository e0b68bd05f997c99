"""The documentation is true: its commands print what the pages show, its Python runs, its links lead somewhere.

`pytest tests/test_docs.py --update-golden` writes the shown output and the help in docs/cli.md anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from hccl_fusion.cli.main import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "examples" / "README.md"]
LINKED = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
COMMANDS = cli.list_commands(None)
HELP_START, HELP_END = "<!-- help: start -->\n", "<!-- help: end -->\n"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TENSORFLOW_LOG = re.compile(r"[IWE]0000 |WARNING: All log messages before absl")
_SHOWN = re.compile(r"print\(.*\)  # (.*)$", re.MULTILINE)


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


def blocks(page: Path, language: str) -> list[str]:
    return [content for found, content in _BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


@dataclass(frozen=True)
class Command:
    """One command of a console block and the output that the page shows."""

    text: str
    output: str

    def __str__(self) -> str:
        return f"$ {self.text}\n{self.output}"


def commands(block: str) -> list[Command]:
    found = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        text, _, output = part.partition("\n")
        while text.endswith("\\"):
            more, _, output = output.partition("\n")
            text += f"\n{more}"
        found.append(Command(text, output))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a page's commands run: as in the checkout, but what they write goes elsewhere."""
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def environment() -> dict[str, str]:
    """The tested checkout and this interpreter come first; nothing depends on the terminal or the language."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    fixed = {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "COLUMNS": "100", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {**os.environ, "PATH": path, **fixed}


def run(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output: stdout and stderr as a terminal shows them.

    Blanks at the ends of lines and the log lines of TensorFlow are left out.
    """
    done = subprocess.run(
        arguments, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.decode("utf-8").splitlines() if not _TENSORFLOW_LOG.match(line)]
    return done.returncode, "".join(f"{line.rstrip()}\n" for line in lines)


def run_command(command: Command, folder: Path) -> Command:
    code, output = run(["bash", "-o", "pipefail", "-c", command.text], folder)
    expected = 2 if output.startswith("error: ") else 0
    assert code == expected, f"exit code {code} of: {command.text}\n{output}"
    return Command(command.text, output)


@each_page
def test_the_page_is_true(page, folder, update_golden):
    """Its commands run one after another, then its Python as one program beside the files that they wrote."""
    for block in blocks(page, "console"):
        shown = commands(block)
        assert shown, f"a console block of {page_name(page)} has no line that starts with `$ `"
        found = [run_command(command, folder) for command in shown]
        if update_golden:
            anew = "".join(map(str, found)).rstrip() + "\n"
            page.write_text(page.read_text(encoding="utf-8").replace(block, anew), encoding="utf-8")
        else:
            # A blank line at the end of an output is shown or not, as it looks better.
            assert [str(command).rstrip() for command in found] == [str(command).rstrip() for command in shown]
    program = "\n".join(blocks(page, "python"))
    code, output = run([sys.executable, "-c", program], folder)
    assert code == 0, output
    assert output.splitlines() == _SHOWN.findall(program)


def test_the_command_reference_is_fresh(update_golden):
    page = ROOT / "docs" / "cli.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(HELP_START)
    shown, _, after = rest.partition(HELP_END)
    expected = "".join(help_section(name) for name in ("", *COMMANDS))
    if update_golden:
        page.write_text(f"{before}{HELP_START}{expected}{HELP_END}{after}", encoding="utf-8")
    else:
        # The releases of click differ in blanks and line breaks.
        assert shown.split() == expected.split(), "run pytest tests/test_docs.py --update-golden"


def help_section(name: str) -> str:
    arguments = [name, "--help"] if name else ["--help"]
    result = CliRunner().invoke(cli, arguments, prog_name="hccl-fusion", terminal_width=100)
    assert result.exit_code == 0, result.output
    return f"\n### {f'hccl-fusion {name}'.strip()}\n\n```text\n{result.output.rstrip()}\n```\n\n"


def test_the_ci_sets_up_as_the_readme_says():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()]
    assert len(lines) == 2
    assert [part for line in lines for part in line.split(" && ") if part not in script] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_shown(name):
    assert f"hccl-fusion {name}" in (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [command.text for page in PAGES for block in blocks(page, "console") for command in commands(block)]
    # The demo takes half a minute: it is a step of .ci/run instead.
    assert name == "demo" or any(f"hccl-fusion {name} " in text for text in shown)


@pytest.mark.parametrize("page", LINKED, ids=page_name)
def test_links_lead_somewhere(page):
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), f"{page_name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(aim), f"{page_name(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


SOURCES = [
    path for name in ("graph_passes", "hccl_fusion", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))
]


@pytest.mark.parametrize("path", SOURCES, ids=page_name)
def test_pages_that_the_code_names_are_there(path):
    for name in re.findall(r"docs/\w+\.md", path.read_text(encoding="utf-8")):
        assert (ROOT / name).exists()


def test_the_design_has_a_line_for_every_module():
    """For those of `graph_passes` and at the top of `hccl_fusion`; the other packages have one as a whole."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    modules = [path.name for name in ("graph_passes", "hccl_fusion") for path in (ROOT / name).glob("[!_]*.py")]
    packages = [f"{path.parent.name}/" for path in (ROOT / "hccl_fusion").glob("*/__init__.py")]
    assert [name for name in modules + packages if f"`{name}" not in text] == []


def test_every_reason_is_explained():
    from graph_passes.sections import Reason

    text = (ROOT / "docs" / "forms.md").read_text(encoding="utf-8")
    assert [reason.value for reason in Reason if f"| `{reason.value}` |" not in text] == []
