"""The kernels of latent attention besides those of all layers: norms, turns, and products of each head.

A row's latent vector goes to the cache normed, its keys' turned part behind it. Queries are made of the row, or of a
latent vector of their own. Each head's query goes through the head's keys to the latent vector's dimensions, meets what
the cache holds, and what it finds there goes through the head's values. Products sum along the depth in one order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable
from swiftbatch.worker.kernels.cuda.kv_buffers import store_halves
from swiftbatch.worker.kernels.cuda.layer_kernels import is_padding, normed_row
from swiftbatch.worker.kernels.cuda.linear import TILE_COLUMNS
from swiftbatch.worker.kernels.cuda.packed_linear import WeightKernel, read
from swiftbatch.worker.kernels.cuda.rounding import dot, rounded
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedLatent
from swiftbatch.worker.kernels.decoder_weights import AnyLinear, DecoderSizes
from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH, LatentSizes
from swiftbatch.worker.kernels.layer_forms import NormForm

TILE_ROWS = 64  # of a program: numbers of rows are multiples of it
EPSILON = 1e-6  # of the norms of latent vectors, whatever that of the others is


@triton.jit
def turned_halves(pointers, angles_ptr, mask, DIM: tl.constexpr, dtype: tl.constexpr):
    """Heads' turned dimensions by halves, float32, from angles as `rope_store` has them."""
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointers + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    cosines = tl.load(angles_ptr, mask=mask, other=0.0).to(tl.float32)
    sines = tl.load(angles_ptr + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return rounded(first * cosines - second * sines, dtype), rounded(second * cosines + first * sines, dtype)


@triton.jit
def keep_latent_row(
    down_ptr, angles_ptr, query_norm_ptr, key_norm_ptr, rows_ptr, vector_ptr, kept_ptr, epsilon,
    stride_slot, stride_entry, DOWN: tl.constexpr, QUERY_RANK: tl.constexpr, RANK: tl.constexpr,
    TURNED: tl.constexpr, QUERY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, SPUN: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Program (row): its entry of the cache, from the last numbers of `down`, and the vector that queries are of."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    dtype: tl.constexpr = down_ptr.dtype.element_ty
    down_ptr += row * DOWN
    if QUERY_RANK:
        places = tl.arange(0, QUERY_WIDTH)
        is_real = places < QUERY_RANK
        vector = tl.load(down_ptr + places, mask=is_real, other=0.0).to(tl.float32)
        vector = normed_row(vector, is_real, query_norm_ptr, places, QUERY_RANK, epsilon, FORM, dtype)
        tl.store(vector_ptr + row * QUERY_RANK + places, vector, mask=is_real)
    entry_ptr = kept_ptr + tl.load(rows_ptr + row * 5).to(tl.int64) * stride_slot
    entry_ptr += tl.load(rows_ptr + row * 5 + 4).to(tl.int64) * stride_entry
    down_ptr += DOWN - RANK - TURNED
    columns = tl.arange(0, WIDTH)
    is_column = columns < RANK
    kept = tl.load(down_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    kept = normed_row(kept, is_column, key_norm_ptr, columns, RANK, epsilon, FORM, dtype)
    tl.store(entry_ptr + columns, kept, mask=is_column)
    spun = tl.arange(0, SPUN)
    is_spun = spun < TURNED // 2
    angles_ptr += tl.load(rows_ptr + row * 5 + 3).to(tl.int64) * TURNED + spun
    first, second = turned_halves(down_ptr + RANK + spun, angles_ptr, is_spun, TURNED, dtype)
    store_halves(entry_ptr + RANK + spun, first, second, is_spun, TURNED)


@triton.jit
def turn_heads(input_ptr, row_ptr, angles_ptr, out_ptr, TURNED: tl.constexpr, SPUN: tl.constexpr, dtype: tl.constexpr):
    """The turned part of one head of all rows, from and to where it begins in each."""
    spun = tl.arange(0, SPUN)[None, :]
    mask = (tl.load(row_ptr + 2) > 0)[:, None] & (spun < TURNED // 2)
    angles = angles_ptr + tl.load(row_ptr + 3).to(tl.int64)[:, None] * TURNED + spun
    first, second = turned_halves(input_ptr + spun, angles, mask, TURNED, dtype)
    store_halves(out_ptr + spun, first, second, mask, TURNED)


@triton.jit
def multiply_heads(
    input_ptr, weight_ptr, rows_ptr, angles_ptr, out_ptr,
    TILE_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, IN_ROW: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, TURNED: tl.constexpr, SPUN: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (head, columns, rows): the product of the head's first numbers with its rows of the weight.

    Where `TURNED` numbers are behind these, a head's last program turns them, to behind the product. Heads of a row
    lie side by side, the rows of the input `IN_ROW` numbers apart.
    """
    head, rows = tl.program_id(0), tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    input_ptr += rows.to(tl.int64)[:, None] * IN_ROW + head * (DEPTH + TURNED)
    out_ptr += (rows.to(tl.int64)[:, None] * NUM_HEADS + head) * (COLUMNS + TURNED)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    start_column = tl.program_id(1) * TILE_COLUMNS
    if TURNED and start_column >= COLUMNS:
        turn_heads(input_ptr + DEPTH, rows_ptr + rows * 5, angles_ptr, out_ptr + COLUMNS, TURNED, SPUN, dtype)
        return
    columns, depth = start_column + tl.arange(0, TILE_COLUMNS), tl.arange(0, BLOCK_DEPTH)
    known = tl.where(columns < COLUMNS, columns, 0)  # reads a column that there is, and is not stored
    weight_ptr += (head.to(tl.int64) * COLUMNS + known)[None, :] * DEPTH + depth[:, None]
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        is_there = depth < DEPTH - start
        x = read(input_ptr + start + depth[None, :], is_there[None, :], DEPTH % BLOCK_DEPTH == 0)
        w = read(weight_ptr + start, is_there[:, None], DEPTH % BLOCK_DEPTH == 0)
        acc = dot(x, w, acc)
    tl.store(out_ptr + columns[None, :], rounded(acc, dtype), mask=(columns < COLUMNS)[None, :])


class CudaLatents:
    """The buffers of latent attention, and what it launches around the attention itself."""

    def __init__(
        self, sizes: DecoderSizes, latent: LatentSizes, linear: WeightKernel, device: torch.device, num_rows: int
    ) -> None:
        """Buffers of zeros: what padding rows have never written are numbers, too."""
        self._sizes, self._latent, self._linear, self._num_rows = sizes, latent, linear, num_rows
        queries = sizes.num_heads * latent.query_dim
        of_vectors = queries if latent.query_rank else 0
        widths = ((latent.query_rank or queries) + latent.entry_dim, latent.query_rank, of_vectors, sizes.found_width)
        self._down, self._vector, self._queries, self._found = (
            torch.zeros(num_rows, width, dtype=sizes.dtype, device=device) for width in widths
        )

    def keep(
        self,
        weights: StackedLatent,
        down: AnyLinear,
        rows: Tensor,
        table: CudaRowTable[Tensor],
        angles: Tensor,
        kept: Tensor,
        query: Tensor,
    ) -> None:
        """Write the entries of `rows [num_rows, hidden]` to `kept [num_slots, 1, capacity, entry_dim]`.

        And `query [num_rows, num_heads, entry_dim]` as it meets them. `down` makes both vectors, or where queries have
        none, these themselves in front of the one that is kept.
        """
        sizes, latent = self._sizes, self._latent
        self._linear(rows, down.weight, down.bias, self._down)
        keep_latent_row[(self._num_rows,)](
            self._down, angles, weights.query_norm, weights.key_norm, table.rows, self._vector, kept, EPSILON,
            kept.stride(0), kept.stride(2), **keep_constants(latent, self._down.shape[1], sizes.norm_form),
        )  # fmt: skip
        queries = self._down
        if weights.query is not None:
            self._linear(self._vector, weights.query.weight, weights.query.bias, self._queries)
            queries = self._queries
        self._multiply(queries, weights.key_up, table, angles, query, latent.turned_dim)

    def values(self, weights: StackedLatent, mixed: Tensor, table: CudaRowTable[Tensor]) -> Tensor:
        """The values `[num_rows, num_heads * value_dim]` of what heads have `mixed [num_rows, num_heads, rank]`."""
        self._multiply(mixed.flatten(1), weights.value_up, table, None, self._found)
        return self._found

    def _multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        table: CudaRowTable[Tensor],
        angles: Tensor | None,
        out: Tensor,
        num_turned: int = 0,
    ) -> None:
        constants = head_constants(self._sizes.num_heads, weight, rows.shape[1], num_turned)
        num_tiles = triton.cdiv(constants["COLUMNS"], TILE_COLUMNS) + (num_turned > 0)
        grid = (self._sizes.num_heads, num_tiles, self._num_rows // TILE_ROWS)
        multiply_heads[grid](rows, weight, table.rows, angles, out, **constants)


def keep_constants(latent: LatentSizes, down_width: int, form: NormForm) -> dict[str, int]:
    """Return the constants of `keep_latent_row`."""
    return {
        "DOWN": down_width,
        "QUERY_RANK": latent.query_rank,
        "RANK": latent.rank,
        "TURNED": latent.turned_dim,
        "QUERY_WIDTH": triton.next_power_of_2(max(1, latent.query_rank)),
        "WIDTH": triton.next_power_of_2(latent.rank),
        "SPUN": triton.next_power_of_2(latent.turned_dim // 2),
        "FORM": int(form),
    }


def head_constants(num_heads: int, weight: Tensor, row_width: int, num_turned: int) -> dict[str, Any]:
    """Return the constants of `multiply_heads`, with its warps and stages."""
    return {
        "TILE_ROWS": TILE_ROWS,
        "NUM_HEADS": num_heads,
        "IN_ROW": row_width,
        "DEPTH": weight.shape[1],
        "COLUMNS": weight.shape[0] // num_heads,
        "TURNED": num_turned,
        "SPUN": triton.next_power_of_2(max(2, num_turned) // 2),
        "TILE_COLUMNS": TILE_COLUMNS,
        "BLOCK_DEPTH": BLOCK_DEPTH,
        "num_warps": 4 if weight.dtype == torch.bfloat16 else 8,
        "num_stages": 4,
    }
