"""Writes JSON documents to files, whole or not at all."""

from __future__ import annotations

__all__ = ["write_json"]

import json
from typing import Any

from graph_passes.atomic import replace_file
from hccl_fusion.errors import HcclFusionError


def write_json(path: str, document: dict[str, Any]) -> None:
    """Writes a JSON file, whole or not at all.

    Raises:
        HcclFusionError: the file cannot be written.
    """
    try:
        replace_file(path, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8"))
    except OSError as error:
        raise HcclFusionError(
            "cannot write the file", where=path, found=error.strerror, expected="a writable place"
        ) from error
