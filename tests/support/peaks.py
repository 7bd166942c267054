"""Peaks of this process's memory. `ru_maxrss` would not do: it is that of the whole test session."""

from __future__ import annotations

from pathlib import Path


def begin_peak() -> int:
    """The memory in KiB that the process has now, from where `peak` counts."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _kib("VmRSS")


def peak() -> int:
    """The most memory in KiB that it has had since."""
    return _kib("VmHWM")


def _kib(name: str) -> int:
    return int(Path("/proc/self/status").read_text(encoding="utf-8").partition(f"{name}:")[2].split()[0])
