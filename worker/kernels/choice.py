"""The kernels that a GPU's forwards can choose between. Light to import: the command line shows them."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, fields, replace

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.option_values import AttentionName, LinearName

FLASH_PACKAGE = "flash-attn"
CUBLAS_WORKSPACES = ":4096:8"  # their sizes; what cuBLAS chooses follows from them, so they never change
MOST_FLASH_DIM = 256  # of a head


@dataclass(frozen=True)
class CudaKernels:
    """A run's choice. Catalogues with these names: `ATTENTION_KERNELS` and `LINEAR_KERNELS`."""

    attention: AttentionName = "triton"  # to what lies before a draft tree
    linear: LinearName = "cublas"  # for weights that are not packed

    @property
    def words(self) -> str:
        """The name that verdicts are kept under. It has libraries' versions, since other ones may round otherwise."""
        attention = f"flash {flash_version() or 'absent'}" if self.attention == "flash" else self.attention
        return f"{attention} prefixes, {self.linear} products, triton {triton_version()}"

    @property
    def options(self) -> str:
        """The options of a command that are not at their defaults."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return " ".join(f"--{name} {value}" for name, value in named.items() if value != getattr(CudaKernels, name))

    def for_weights(self, is_packed: bool) -> CudaKernels:
        """The kernels that run: packed weights take `triton` for all products, since cuBLAS reads no codes."""
        return replace(self, linear="triton") if is_packed else self

    def refuse_unused(self, why: str) -> None:
        """Raise ModelError where kernels were chosen that nothing here runs; `why` says what does."""
        if self.options:
            raise ModelError(f"{self.options}: a choice of kernels on a GPU, but {why}; leave it away")

    def refuse_unfit(self, dtype: str, head_dim: int | None = None) -> None:
        """Raise ModelError where flash-attn was chosen and cannot attend: `dtype` as in `bfloat16`."""
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
        """Raise ModelError where flash-attn was chosen and is not installed here."""
        if self.attention == "flash" and flash_version() is None:
            raise ModelError(
                f"--attention flash: {FLASH_PACKAGE} is not installed here; docs/gpu.md says how, or use "
                "--attention triton"
            )


DEFAULT_KERNELS = CudaKernels()


def flash_version() -> str | None:
    """Return the version of the installed flash-attn, as in `2.8.3`; None where there is none."""
    return _version(FLASH_PACKAGE)


def triton_version() -> str:
    """The version of Triton, which compiles the kernels: another one may sum in another order."""
    return _version("triton") or "absent"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
