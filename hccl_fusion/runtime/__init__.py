"""What runs graphs: ranks, collectives, comparison. Only what is in here loads TensorFlow's runtime."""

from __future__ import annotations

__all__: list[str] = []
