"""GraphDef in, GraphDef out: the passes and what they stand on. Nothing here loads TensorFlow's runtime."""

from __future__ import annotations

__all__: list[str] = []
