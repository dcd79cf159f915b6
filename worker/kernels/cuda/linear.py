"""Linear layers over all rows of a forward: cuBLAS at one constant shape, or a product of our own.

What cuBLAS runs follows from the whole shape, which is always the same; that a row's place does not change its bits is
what `doctor` tries. `triton_linear` sums in an order that is written here.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.jobs.run.option_values import LinearName
from swiftbatch.worker.kernels.cuda.rounding import dot, rounded
from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH, NUM_ROWS

TILE_COLUMNS = 32  # of a program: enough programs for every multiprocessor
MOST_TILE_BYTES = 256  # of a program's column of rows: stages of its blocks fit the shared memory of an A100


class LinearKernel(Protocol):
    """`rows [num_rows, depth] @ weight [columns, depth].T + bias [columns]`, summed and added up in float32."""

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write `out [num_rows, columns]`, of the rows' dtype or float32."""


def cublas_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """A `LinearKernel`; on a CPU the library there, where `out` is of the rows' dtype."""
    if out.dtype != rows.dtype:
        torch.ops.aten.mm.dtype_out(rows, weight.t(), out.dtype, out=out)
        if bias is not None:
            out.add_(bias)
    elif bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


@triton.jit
def multiply_columns(
    input_ptr, weight_ptr, bias_ptr, out_ptr, num_columns,
    TILE_ROWS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns): blocks of the depth one after the other, the bias last."""
    rows = tl.arange(0, TILE_ROWS)
    input_ptr += tl.program_id(0) * TILE_ROWS * DEPTH
    out_ptr += tl.program_id(0) * TILE_ROWS * num_columns
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < num_columns
    known = tl.where(is_column, columns, 0)  # reads a column that there is, and is not stored
    depth = tl.arange(0, BLOCK_DEPTH)
    input_ptr += rows[:, None] * DEPTH + depth[None, :]
    weight_ptr += known.to(tl.int64)[None, :] * DEPTH + depth[:, None]
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        if DEPTH % BLOCK_DEPTH == 0:
            x = tl.load(input_ptr + start)
            w = tl.load(weight_ptr + start)
        else:
            x = tl.load(input_ptr + start, mask=(depth < DEPTH - start)[None, :], other=0.0)
            w = tl.load(weight_ptr + start, mask=(depth < DEPTH - start)[:, None], other=0.0)
        acc = dot(x, w, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + known).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptr + places, rounded(acc, out_ptr.dtype.element_ty), mask=is_column[None, :])


def triton_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """A `LinearKernel`; on a CPU in Triton's interpreter."""
    num_columns, depth = weight.shape
    multiply_columns[product_grid(rows, num_columns)](
        rows, weight, bias, out, num_columns, **multiply_constants(depth, bias is not None, tile_rows(rows))
    )


def tile_rows(rows: Tensor) -> int:
    """Rows that a program multiplies: of a power of two of them, all, or as many as it has memory for."""
    return min(len(rows), MOST_TILE_BYTES // rows.element_size())


def product_grid(rows: Tensor, num_columns: int) -> tuple[int, int]:
    """Programs of a product: those of the same columns one after the other, so that they share what a cache holds."""
    return len(rows) // tile_rows(rows), triton.cdiv(num_columns, TILE_COLUMNS)


def multiply_constants(depth: int, has_bias: bool, num_tile_rows: int = NUM_ROWS) -> dict[str, int]:
    """Return the constants of `multiply_columns`, with its warps and stages."""
    return {
        "TILE_ROWS": num_tile_rows,
        "DEPTH": depth,
        "HAS_BIAS": has_bias,
        "TILE_COLUMNS": TILE_COLUMNS,
        "BLOCK_DEPTH": BLOCK_DEPTH,
        "num_warps": 4,
        "num_stages": 4,
    }


LINEAR_KERNELS: dict[LinearName, LinearKernel] = {"cublas": cublas_linear, "triton": triton_linear}
