"""The demonstration, and the ResNet-50 training graph that it is made with."""

from __future__ import annotations

__all__: list[str] = []
