"""Choice of a run's kernels and cache dtypes, and errors for unsupported choices, without heavy imports."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import AttentionName, KVDtype, LinearName
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS

FLASH_PACKAGE = "flash-attn"
CUBLAS_WORKSPACES = ":4096:8"  # cuBLAS's choices depend on them, so they never change
MOST_FLASH_DIM = 256


@dataclass(frozen=True)
class CudaKernels:
    """A run's choice of kernels; `ATTENTION_KERNELS` and `LINEAR_KERNELS` list the possible kernels."""

    attention: AttentionName = "triton"  # attends to prefixes
    linear: LinearName = "cublas"  # multiplies weights that are not packed; int8: on a CPU, see `has_integer_rows`
    num_rows: int = NUM_ROWS  # one of `ROW_CHOICES`

    @property
    def words(self) -> str:
        """Return the kernels' name in `doctor`'s verdicts, with the versions of libraries."""
        attention = f"flash {flash_version() or 'absent'}" if self.attention == "flash" else self.attention
        return f"{attention} prefixes, {self.linear} products, triton {triton_version()}{self.rows_suffix}"

    @property
    def rows_suffix(self) -> str:
        """Return the suffix of a numerics name, which is empty for the smallest `num_rows`."""
        return "" if self.num_rows == NUM_ROWS else f", {self.num_rows} rows"

    @property
    def has_integer_rows(self) -> bool:
        """Return whether a CPU's products with packed weights round their rows to 8 bits."""
        return self.linear == "int8"

    @property
    def options(self) -> str:
        named = {name: getattr(self, name) for name in ("attention", "linear")}
        return " ".join(f"--{name} {value}" for name, value in named.items() if value != getattr(CudaKernels, name))

    def for_weights(self, is_packed: bool) -> CudaKernels:
        """Return the kernels that actually run, because cuBLAS cannot read packed weights."""
        return replace(self, linear="triton") if is_packed else self

    def refuse_unused(self, why: str) -> None:
        """Raise ModelError if a GPU's kernels were chosen but none of them would run; `why` says what runs instead."""
        of_gpu = replace(self, linear=CudaKernels.linear) if self.has_integer_rows else self
        if of_gpu.options:
            raise ModelError(f"{of_gpu.options}: a choice of kernels on a GPU, but {why}; leave it away")

    def refuse_rows(self, why: str) -> None:
        if self.num_rows != NUM_ROWS:
            raise ModelError(f"--rows {self.num_rows}: a choice of kernels on a GPU, but {why}; leave it away")

    def refuse_integer_rows(self, why: str) -> None:
        """Raise ModelError if rows of 8 bits were chosen but would not be used."""
        if self.has_integer_rows:
            raise ModelError(f"--linear int8: rounds rows to 8 bits in the kernels for CPUs, but {why}; leave it away")

    def refuse_unfit(self, dtype: str, head_dim: int | None = None) -> None:
        """Raise ModelError if flash-attn was chosen but does not support `dtype` (such as "bfloat16") or `head_dim`."""
        if self.attention != "flash":
            return
        if dtype != "bfloat16":
            raise ModelError(f"--attention flash: found dtype {dtype}, expected bfloat16; or use --attention triton")
        if head_dim is not None and (head_dim > MOST_FLASH_DIM or head_dim % 8):
            raise ModelError(
                f"--attention flash: found heads of {head_dim} dimensions, expected a multiple of 8 up to "
                f"{MOST_FLASH_DIM}; use --attention triton"
            )

    def refuse_absent(self) -> None:
        """Raise ModelError if flash-attn was chosen but is not installed."""
        if self.attention == "flash" and flash_version() is None:
            raise ModelError(
                f"--attention flash: {FLASH_PACKAGE} is not installed here; docs/gpu.md says how, or use "
                "--attention triton"
            )


DEFAULT_KERNELS = CudaKernels()


def flash_version() -> str | None:
    """Return the installed flash-attn's version, such as "2.8.3", or None if it is not installed."""
    return _version(FLASH_PACKAGE)


def triton_version() -> str:
    """Return Triton's version, because other versions may sum in another order."""
    return _version("triton") or "absent"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def with_kv(numerics: str, kv_dtype: KVDtype | None) -> str:
    return numerics if kv_dtype is None else f"{numerics}, {kv_dtype} keys and values"


def refuse_kv_dtype(kv_dtype: KVDtype | None, attention: AttentionName) -> None:
    """Raise ModelError for 8-bit keys and values with flash-attn."""
    if kv_dtype is not None and attention == "flash":
        raise ModelError(
            f"--kv-dtype {kv_dtype}: flash-attn reads keys and values of the run's dtype alone; "
            "use --attention triton, or leave it away"
        )


def refuse_latent(kv_dtype: KVDtype | None, model: str) -> None:
    """Raise ModelError for 8-bit keys and values of a model with latent vectors."""
    if kv_dtype is not None:
        raise ModelError(
            f"--kv-dtype {kv_dtype}: caches of {model} hold a latent vector per position in place of keys and values, "
            "and no code of 8 bits for it; leave it away"
        )


def refuse_indexed(kv_dtype: KVDtype | None, model: str) -> None:
    """Raise ModelError for 8-bit keys and values of a model with indexers."""
    if kv_dtype is not None:
        raise ModelError(
            f"--kv-dtype {kv_dtype}: caches of {model} hold an index key per position beside keys and values, and no "
            "code of 8 bits for it; leave it away"
        )


def refuse_several_gpus(num_gpus: int, why: str) -> None:
    """Raise ModelError if several GPUs were chosen to share a model, but do not."""
    if num_gpus > 1:
        raise ModelError(
            f"--gpus-per-worker {num_gpus}: GPUs share a model in our kernels for CUDA alone, but {why}; leave it away"
        )


def refuse_without_kernels(kv_dtype: KVDtype | None, model: str) -> None:
    """Raise ModelError for 8-bit keys and values of a model without GPU kernels."""
    if kv_dtype is not None:
        raise ModelError(
            f"--kv-dtype {kv_dtype}: on a GPU our kernels alone read keys and values in 8 bits, and they do not know "
            f"the model {model}; leave it away, or use --device cpu"
        )
