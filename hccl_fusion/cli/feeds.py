"""Reads values for placeholders from an .npz file."""

from __future__ import annotations

__all__ = ["read_feeds"]

import zipfile
import zlib
from typing import Any

import numpy as np

from hccl_fusion.errors import UsageError


def read_feeds(path: str | None) -> dict[str, Any] | None:
    """The arrays of an .npz file by tensor name; None without a file.

    Raises:
        UsageError: the file is missing or holds something else.
    """
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError) as error:
        raise UsageError(
            "the feeds cannot be read",
            where=f"option --feeds {path}",
            found=str(error),
            expected="an .npz file with one array a tensor name",
            remedy="numpy.savez",
        ) from error
