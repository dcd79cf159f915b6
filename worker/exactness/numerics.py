"""Attempts on other numerics are exact only up to ties."""

from __future__ import annotations

from collections.abc import Iterable

from swiftbatch.jobs.run.records import Exactness


def exactness_of(verdict: Exactness, numerics: Iterable[str]) -> Exactness:
    """The run's verdict for a job whose attempts all had the same numerics, else that it holds up to ties."""
    return verdict if len(set(numerics)) <= 1 else "exact up to ties"
