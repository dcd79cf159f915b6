"""The choice of keys and values in 8 bits: its name in a run's numerics, and where it is refused. Needs no torch."""

from __future__ import annotations

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.option_values import KVDtype


def with_kv(numerics: str, kv_dtype: KVDtype | None) -> str:
    """The name of numerics with that of the rows that caches keep, where these are not of the run's dtype."""
    return numerics if kv_dtype is None else f"{numerics}, {kv_dtype} keys and values"


def refuse_kv_dtype(kv_dtype: KVDtype | None, device: str) -> None:
    """Raise ModelError for keys and values in 8 bits where no kernel reads them."""
    if kv_dtype is not None and device == "cuda":
        raise ModelError(
            f"--kv-dtype {kv_dtype}: the kernels for GPUs read keys and values of the run's dtype alone; "
            "leave it away, or use --device cpu"
        )
