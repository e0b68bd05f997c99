"""Where results go: destinations are looked at before the work begins, so that a slip costs neither time nor a file."""

from __future__ import annotations

__all__ = ["check_destinations", "one_result_only"]

import itertools
import os
import stat
from collections.abc import Mapping

from hccl_fusion.errors import UsageError

_SAVED_MODEL_NAMES = ("saved_model.pb", "saved_model.pbtxt")


def one_result_only(one: str, other: str) -> UsageError:
    """The error for two options that both claim stdout."""
    return UsageError(
        "stdout can carry one result only", where=f"options {one} and {other}", found="both", expected="one of them"
    )


def check_destinations(
    destinations: Mapping[str, str | None], source: str | None = None, *, may_be_folder: bool = False
) -> None:
    """Checks the outputs of a command; `-` is stdout, None is an output that was not asked for.

    Args:
        destinations: path by option.
        source: a file that is read, which none of them may overwrite.
        may_be_folder: an output may be a folder that is there already.

    Raises:
        UsageError: two outputs are the same, one is the source or a folder, or lies where nothing can be written.
    """
    given = {option: path for option, path in destinations.items() if path is not None}
    for (one, path), (other, other_path) in itertools.combinations(given.items(), 2):
        if path == other_path == "-":
            raise one_result_only(f"{one} -", f"{other} -")
        if _is_same(path, other_path):
            raise UsageError(
                "two results go to one file",
                where=f"options {one} and {other}",
                found=path,
                expected="a file of its own for each",
            )
    for option, path in given.items():
        if path != "-":
            _require_folder(option, path)
            if not may_be_folder and os.path.isdir(path):
                where, expected = f"option {option}", "the name of a file"
                raise UsageError("the output is a folder", where=where, found=path, expected=expected)
            if source not in (None, "-"):
                _refuse_source(option, path, source)


def _is_same(one: str, other: str) -> bool:
    if "-" in (one, other):
        return False
    if os.path.exists(one) and os.path.exists(other):
        return _is_regular(one) and os.path.samefile(one, other)
    return os.path.realpath(one) == os.path.realpath(other)


def _is_regular(path: str) -> bool:
    return stat.S_ISREG(os.stat(path).st_mode)


def _refuse_source(option: str, path: str, source: str) -> None:
    inside = [os.path.join(source, name) for name in _SAVED_MODEL_NAMES]
    if any(_is_same(path, candidate) for candidate in (source, *inside)):
        raise UsageError(
            "the output would overwrite the input",
            where=f"option {option}",
            found=path,
            expected="another name",
            remedy=f"another path for {option}",
        )


def _require_folder(option: str, path: str) -> None:
    where = f"option {option}"
    if not path:
        raise UsageError("the output has no name", where=where, found="''", expected="a path, or - for stdout")
    if os.path.exists(path) and not os.path.isdir(path) and not _is_regular(path):
        return  # a device or a pipe
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.exists(folder):
        shown = os.path.dirname(path) or folder
        raise UsageError(
            "the output's folder does not exist", where=f"{where} {path}", found=f"no folder {shown}",
            expected="a folder that exists", remedy=f"mkdir -p {shown}",
        )  # fmt: skip
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        found = "a folder without write permission" if os.path.isdir(folder) else f"{folder} is no folder"
        raise UsageError(
            "the output cannot be written", where=f"{where} {path}", found=found, expected="a folder to write to",
            remedy="another path",
        )  # fmt: skip
