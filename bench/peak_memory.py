"""The most memory that this process held since a moment ago (Linux)."""

from __future__ import annotations

from pathlib import Path

RESET_PEAK = "5"  # proc(5): sets the "high water mark" back to what is resident now


def reset_peak() -> int:
    """Start a new measurement; returns the bytes resident now."""
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most bytes resident since `reset_peak`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kibibytes] = [int(line.split()[1]) for line in lines if line.startswith(f"{field}:")]
    return kibibytes * 1024
