"""The choice of keys and values in 8 bits: its name in a run's numerics, and where it is refused. Needs no torch."""

from __future__ import annotations

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.option_values import AttentionName, KVDtype


def with_kv(numerics: str, kv_dtype: KVDtype | None) -> str:
    """The name of numerics with that of the rows that caches keep, where these are not of the run's dtype."""
    return numerics if kv_dtype is None else f"{numerics}, {kv_dtype} keys and values"


def refuse_kv_dtype(kv_dtype: KVDtype | None, attention: AttentionName) -> None:
    """Raise ModelError for keys and values in 8 bits where an attention was chosen that does not read them."""
    if kv_dtype is not None and attention == "flash":
        raise ModelError(
            f"--kv-dtype {kv_dtype}: flash-attn reads keys and values of the run's dtype alone; "
            "use --attention triton, or leave it away"
        )


def refuse_latent(kv_dtype: KVDtype | None, model: str) -> None:
    """Raise ModelError for keys and values in 8 bits of a model whose caches hold latent vectors in their place."""
    if kv_dtype is not None:
        raise ModelError(
            f"--kv-dtype {kv_dtype}: caches of {model} hold a latent vector per position in place of keys and values, "
            "and no code of 8 bits for it; leave it away"
        )


def refuse_without_kernels(kv_dtype: KVDtype | None, model: str) -> None:
    """Raise ModelError for keys and values in 8 bits of a model that the kernels for GPUs do not know."""
    if kv_dtype is not None:
        raise ModelError(
            f"--kv-dtype {kv_dtype}: on a GPU our kernels alone read keys and values in 8 bits, and they do not know "
            f"the model {model}; leave it away, or use --device cpu"
        )
