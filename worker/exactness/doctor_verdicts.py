"""Stored verdicts of `doctor` for a run's manifest, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from swiftbatch.jobs.run.run_records import Exactness
from swiftbatch.worker.model.user_cache import cache_folder


def verdict_key(
    fingerprint: str, dtype: str, device: str, num_threads: int, hardware: str, torch: str, kernels: str
) -> str:
    """Return a hash of everything that a verdict depends on."""
    named = json.dumps([fingerprint, dtype, device, num_threads, hardware, torch, kernels])
    return hashlib.sha256(named.encode()).hexdigest()


def keep_verdict(key: str, verdict: Exactness) -> None:
    """Store a verdict, unless the cache folder cannot be written."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(verdict, encoding="utf-8")
    except OSError:
        return


def known_verdict(key: str) -> Exactness:
    """Return the stored verdict, or `not probed`."""
    try:
        text = _path(key).read_text(encoding="utf-8")
    except OSError:
        return "not probed"
    if text == "exact":
        return "exact"
    return "exact up to ties" if text == "exact up to ties" else "not probed"


def _path(key: str) -> Path:
    return cache_folder("doctor") / key


def exactness_of(verdict: Exactness, numerics: Iterable[str]) -> Exactness:
    """Return the run's verdict if all attempts had the same numerics, otherwise `exact up to ties`."""
    return verdict if len(set(numerics)) <= 1 else "exact up to ties"
