"""Writes files and folders whole or not at all: to a temporary name beside the target, then renamed."""

from __future__ import annotations

__all__ = ["replace_file", "replace_folder"]

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping


def replace_file(path: str, content: bytes) -> None:
    """Writes `content` to `path`; on any failure what stood there before stands there still.

    A device or a pipe is written to directly: renaming over it would replace it.
    """
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        with open(path, "wb") as stream:  # not its real path, which a pipe under /dev/fd does not have
            stream.write(content)
        return
    target = os.path.realpath(path)
    mode = stat.S_IMODE(os.stat(target).st_mode) if os.path.exists(target) else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(target)[:100]}.", dir=os.path.dirname(target))
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def replace_folder(source: str, path: str, contents: Mapping[str, bytes]) -> None:
    """Copies folder `source` to `path` with some of its files replaced.

    Raises:
        FileExistsError: `path` exists and is another folder; only the source itself is updated in place.
        OSError: `path` lies inside the source.
    """
    if os.path.exists(path):
        if not os.path.samefile(source, path):
            raise FileExistsError(errno.EEXIST, "the folder exists already", path)
        for name, content in contents.items():
            replace_file(os.path.join(path, name), content)
        return
    parent = os.path.dirname(os.path.abspath(path))
    inside = os.path.realpath(source)
    if os.path.commonpath([inside, os.path.realpath(parent)]) == inside:
        raise OSError(errno.EINVAL, "the folder lies inside the one that is copied", path)
    temporary = tempfile.mkdtemp(prefix=f".{os.path.basename(os.path.abspath(path))}.", dir=parent)
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        for name, content in contents.items():
            replace_file(os.path.join(temporary, name), content)
        os.chmod(temporary, 0o777 & ~_umask())
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
