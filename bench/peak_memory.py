"""The peak memory of this process since a reset (Linux)."""

from __future__ import annotations

from pathlib import Path

RESET_PEAK = "5"  # proc(5): resets the "high water mark"


def reset_peak() -> int:
    """Start a measurement; return the resident bytes."""
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kibibytes] = [int(line.split()[1]) for line in lines if line.startswith(f"{field}:")]
    return kibibytes * 1024
