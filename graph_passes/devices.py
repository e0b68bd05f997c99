"""Device strings: one spelling for each device."""

from __future__ import annotations

__all__ = ["normalise_device"]

_SHORT = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU", "npu": "NPU"}


def normalise_device(device: str) -> str:
    """`/job:worker/gpu:0` and `/job:worker/device:GPU:0` become the same text; parts in a fixed order."""
    if not device:
        return ""
    parts: dict[str, str] = {}
    for piece in device.split("/"):
        name, colon, value = piece.partition(":")
        if not colon:
            continue
        if name.lower() in _SHORT:
            name, value = "device", f"{_SHORT[name.lower()]}:{value}"
        elif name == "device":
            kind, _, number = value.partition(":")
            value = f"{kind.upper()}:{number or '*'}"
        parts[name] = value
    order = ("job", "replica", "task", "device")
    return "".join(f"/{name}:{parts[name]}" for name in order if name in parts)
