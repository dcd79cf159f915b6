"""The verdicts that `doctor` found on this machine, kept so that a run's manifest can give them. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from swiftbatch.jobs.run.run_records import Exactness


def verdict_key(
    fingerprint: str, dtype: str, device: str, num_threads: int, hardware: str, torch: str, kernels: str
) -> str:
    """Names everything that a verdict depends on; `hardware` as `hardware_of` says it, `kernels` `chosen_numerics`.

    Which of both a model needs is known where it is loaded alone, so both are named.
    """
    named = json.dumps([fingerprint, dtype, device, num_threads, hardware, torch, kernels])
    return hashlib.sha256(named.encode()).hexdigest()


def keep_verdict(key: str, verdict: Exactness) -> None:
    """Remember a verdict; a cache folder that cannot be written is no reason to fail."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(verdict, encoding="utf-8")
    except OSError:
        return


def known_verdict(key: str) -> Exactness:
    """The verdict that `doctor` gave under this key; `not probed` where it never ran."""
    try:
        text = _path(key).read_text(encoding="utf-8")
    except OSError:
        return "not probed"
    if text == "exact":
        return "exact"
    return "exact up to ties" if text == "exact up to ties" else "not probed"


def _path(key: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "swiftbatch" / "doctor" / key


def exactness_of(verdict: Exactness, numerics: Iterable[str]) -> Exactness:
    """The run's verdict for a job whose attempts all had the same numerics, else that it holds up to ties."""
    return verdict if len(set(numerics)) <= 1 else "exact up to ties"
