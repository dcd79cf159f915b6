"""Triton kernels of multi-head latent attention (MLA): attention, norms, RoPE and projections."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable
from swiftbatch.worker.kernels.cuda.gemm import TILE_COLUMNS, LinearKernel, read
from swiftbatch.worker.kernels.cuda.kv_kernels import load_rows, store_halves
from swiftbatch.worker.kernels.cuda.row_kernels import is_padding, normed_row
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedMLA
from swiftbatch.worker.kernels.cuda.tree_attention import (
    LOG2_E,
    MERGE_STAGES,
    SCALE_TO_LOG2,
    TAIL_TILE_ROWS,
    KeptLayer,
    Scratch,
    blocks_of,
    merge_split,
    resident_programs,
    split_at,
    splits_of_groups,
)
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, rounded
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, BLOCK_DEPTH, LANES, LATENT_BLOCKS, NUM_ROWS, MLASizes
from swiftbatch.worker.kernels.layer_specs import NormForm
from swiftbatch.worker.kernels.quantized_weights import AnyLinear

LEAST_DEPTH = LANES  # tensor cores support no smaller depth


@dataclass(frozen=True)
class MLAShape:
    """Sizes for which a run's latent attention is compiled."""

    num_heads: int
    latent: MLASizes
    dtype: torch.dtype
    num_rows: int = NUM_ROWS

    @property
    def tile_rows(self) -> int:
        """Return the tile height: query heads, of one or several rows, per program."""
        return 64 if self.dtype == torch.bfloat16 else 16

    @property
    def rows_per_group(self) -> int:
        """Return the rows of a sequence whose heads fill one tile; a row with many heads may fill several tiles."""
        return max(1, self.tile_rows // self.num_heads)

    @property
    def num_tiles(self) -> int:
        return -(-self.num_heads // self.tile_rows)

    def seeing_all(self) -> MLAShape:
        """Return the shape of rows that attend to all entries, also in a model with indexers."""
        return replace(self, latent=replace(self.latent, indexer=None))

    def prefix_constants(self) -> dict[str, Any]:
        """Return constants, warps and stages of `latent_prefix_split`."""
        return {
            **self._sizes(),
            "TILE_ROWS": self.tile_rows,
            "NUM_TILES": self.num_tiles,
            "KEYS": 32 if self.dtype == torch.bfloat16 else 16,
            "HALF": max(LEAST_DEPTH, triton.next_power_of_2(self.latent.rank) // 2),
            "num_warps": 8,
            "num_stages": 3,
        }

    def tail_constants(self) -> dict[str, Any]:
        """Return constants, warps and stages of `latent_tail_merge`."""
        return {
            **self._sizes(),
            "TILE_ROWS": TAIL_TILE_ROWS,
            "DEPTH": self.tail_depth,
            "num_warps": 4 if self.dtype == torch.bfloat16 else 8,
            "num_stages": 2,
        }

    @property
    def tail_depth(self) -> int:
        """Return how many dimensions of the latent vector a program of `latent_tail_merge` computes."""
        return min(
            BLOCK_DEPTH if self.dtype == torch.bfloat16 else BLOCK_DEPTH // 4, 1 << (self.latent.rank - 1).bit_length()
        )

    def _sizes(self) -> dict[str, int]:
        return {
            "NUM_ROWS": self.num_rows,
            "NUM_HEADS": self.num_heads,
            "RANK": self.latent.rank,
            "TURNED": self.latent.rope_dim,
            "SPUN": triton.next_power_of_2(self.latent.rope_dim),
            "LEAST_BLOCKS": LATENT_BLOCKS,
            "BLOCK": BLOCK,
        }


@triton.jit
def latent_block(
    query_first, query_second, query_rope, entry_ptr, bias, scale_log2, highest, total, acc_first, acc_second,
    RANK: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, SPUN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Take one step of online softmax over the entries that start at `entry_ptr [keys, 1]`."""
    first, spun = tl.arange(0, HALF), tl.arange(0, SPUN)
    seen = bias > float("-inf")  # hidden entries may contain anything, also NaN
    rows_first = load_rows(entry_ptr + first[None, :], seen, first, RANK, HAS_BIAS or HALF > RANK)
    rows_second = load_rows(entry_ptr + HALF + first[None, :], seen, HALF + first, RANK, HAS_BIAS or 2 * HALF > RANK)
    rows_rope = load_rows(entry_ptr + RANK + spun[None, :], seen, spun, TURNED, HAS_BIAS or SPUN > TURNED)
    scores = dot(query_first, tl.trans(rows_first), tl.zeros([query_first.shape[0], bias.shape[0]], tl.float32))
    scores = dot(query_second, tl.trans(rows_second), scores)
    scores = dot(query_rope, tl.trans(rows_rope), scores) * scale_log2
    if HAS_BIAS:
        scores += (bias * LOG2_E)[None, :]
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    probabilities = tl.exp2(scores - new_highest[:, None])
    decay = tl.exp2(highest - new_highest)
    total = total * decay + tl.sum(probabilities, 1)
    probabilities = rounded(probabilities, rows_first.dtype).to(rows_first.dtype)
    acc_first = dot(probabilities, rows_first, acc_first * decay[:, None])
    acc_second = dot(probabilities, rows_second, acc_second * decay[:, None])
    return new_highest, total, acc_first, acc_second


@triton.jit(do_not_specialize=["num_groups"])
def latent_prefix_split(
    query_ptr, kept_ptr, bias_ptr, pages_ptr, output_ptr, lse_ptr, groups_ptr,
    num_groups, scale_log2, stride_slot, stride_entry, stride_bias, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr, NUM_TILES: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, HALF: tl.constexpr, SPUN: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th split and tile of heads, and does what `prefix_split` does."""
    splits_of_group = splits_of_groups(groups_ptr, num_groups, NUM_ROWS, LEAST_BLOCKS, 0, BLOCK)
    ends = tl.cumsum(splits_of_group, 0)
    own, num_programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(0, tl.cdiv(tl.sum(splits_of_group, 0) * NUM_TILES - own, num_programs)):
        item = own + turn * num_programs
        group, split = split_at(item // NUM_TILES, splits_of_group, ends)
        attend_latent_split(
            query_ptr, kept_ptr, bias_ptr, pages_ptr, output_ptr, lse_ptr, groups_ptr + group * 4, split,
            item % NUM_TILES, scale_log2, stride_slot, stride_entry, stride_bias, stride_pages,
            NUM_ROWS, NUM_HEADS, RANK, TURNED, LEAST_BLOCKS, HAS_BIAS, TILE_ROWS, BLOCK, KEYS, HALF, SPUN, PAGE,
        )  # fmt: skip


@triton.jit
def attend_latent_split(
    query_ptr, kept_ptr, bias_ptr, pages_ptr, output_ptr, lse_ptr, group_ptr, split, tile,
    scale_log2, stride_slot, stride_entry, stride_bias, stride_pages,
    NUM_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, HALF: tl.constexpr, SPUN: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of a group's heads to one split of their prefix, `KEYS` entries at a time."""
    slot = tl.load(group_ptr).to(tl.int64)
    num_rows = tl.load(group_ptr + 2)
    boundary = tl.load(group_ptr + 3)
    _, end, split_blocks = blocks_of(boundary, LEAST_BLOCKS, 0, BLOCK)
    start = split * split_blocks
    end = tl.minimum(start + split_blocks, end)
    place = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_real = place < num_rows * NUM_HEADS
    row_head = tl.load(group_ptr + 1) * NUM_HEADS + place
    first, spun = tl.arange(0, HALF), tl.arange(0, SPUN)
    query_ptr += row_head[:, None] * (RANK + TURNED)
    query_first = load_rows(query_ptr + first[None, :], is_real, first, RANK, True)
    query_second = load_rows(query_ptr + HALF + first[None, :], is_real, HALF + first, RANK, True)
    query_rope = load_rows(query_ptr + RANK + spun[None, :], is_real, spun, TURNED, True)
    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc_first = tl.zeros([TILE_ROWS, HALF], tl.float32)
    acc_second = tl.zeros([TILE_ROWS, HALF], tl.float32)
    for part in range(start * (BLOCK // KEYS), end * (BLOCK // KEYS)):
        entries = part * KEYS + tl.arange(0, KEYS)
        kept = entries
        if PAGE == 1:  # of chosen keys
            kept = tl.load(pages_ptr + slot * stride_pages + entries)
        elif PAGE:
            page = tl.load(pages_ptr + slot * stride_pages + part * KEYS // PAGE)
            kept = page * PAGE + entries % PAGE
        entry_ptr = kept_ptr + slot * stride_slot + kept.to(tl.int64)[:, None] * stride_entry
        bias = tl.zeros([KEYS], tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + slot * stride_bias + entries, mask=entries < boundary, other=float("-inf"))
        highest, total, acc_first, acc_second = latent_block(
            query_first, query_second, query_rope, entry_ptr, bias, scale_log2, highest, total,
            acc_first, acc_second, RANK, TURNED, HALF, SPUN, HAS_BIAS,
        )  # fmt: skip

    row_head += split * (NUM_ROWS * NUM_HEADS)
    output_ptr += row_head[:, None] * RANK + first[None, :]
    tl.store(output_ptr, acc_first / total[:, None], mask=is_real[:, None] & (first < RANK)[None, :])
    tl.store(output_ptr + HALF, acc_second / total[:, None], mask=is_real[:, None] & (HALF + first < RANK)[None, :])
    tl.store(lse_ptr + row_head, highest + tl.log2(total), mask=is_real)


@triton.jit
def latent_tail_merge(
    query_ptr, kept_ptr, output_ptr, lse_ptr, mixed_ptr, rows_ptr, tail_slots_ptr,
    scale_log2, stride_slot, stride_entry,
    NUM_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, RANK: tl.constexpr, TURNED: tl.constexpr,
    LEAST_BLOCKS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    SPUN: tl.constexpr,
):  # fmt: skip
    """Program (row, heads, part of their values): merges the row's tail, then the splits of its prefix in order."""
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row * 5).to(tl.int64)
    boundary = tl.load(rows_ptr + row * 5 + 1)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    if tail_length == 0:
        return

    head = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_real = head < NUM_HEADS
    row_head = row * NUM_HEADS + head
    n, depth, spun = tl.arange(0, BLOCK), tl.arange(0, DEPTH), tl.arange(0, SPUN)
    seen = n < tail_length
    entries = tl.load(tail_slots_ptr + row * BLOCK + n).to(tl.int64)
    entry_ptr = kept_ptr + slot * stride_slot + entries[:, None] * stride_entry
    query_ptr += row_head[:, None] * (RANK + TURNED)
    scores = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
    for start in range(0, RANK, DEPTH):
        query = load_rows(query_ptr + start + depth[None, :], is_real, start + depth, RANK, True)
        keys = load_rows(entry_ptr + start + depth[None, :], seen, start + depth, RANK, True)
        scores = dot(query, tl.trans(keys), scores)
    query = load_rows(query_ptr + RANK + spun[None, :], is_real, spun, TURNED, True)
    keys = load_rows(entry_ptr + RANK + spun[None, :], seen, spun, TURNED, True)
    scores = dot(query, tl.trans(keys), scores) * scale_log2
    scores = tl.where(seen[None, :], scores, float("-inf"))
    highest = tl.max(scores, 1)
    probabilities = tl.exp2(scores - highest[:, None])
    total = tl.sum(probabilities, 1)
    columns = tl.program_id(2) * DEPTH + depth
    values = load_rows(entry_ptr + columns[None, :], seen, columns, RANK, True)
    probabilities = rounded(probabilities, values.dtype).to(values.dtype)
    acc = dot(probabilities, values, tl.zeros([TILE_ROWS, DEPTH], tl.float32))

    _, end, split_blocks = blocks_of(boundary, LEAST_BLOCKS, 0, BLOCK)
    for split in tl.range(0, tl.cdiv(end, split_blocks), num_stages=MERGE_STAGES):
        place = split * (NUM_ROWS * NUM_HEADS) + row_head
        highest, total, acc = merge_split(output_ptr, lse_ptr, place, is_real, highest, total, acc, columns, RANK)
    is_place = is_real[:, None] & (columns < RANK)[None, :]
    mixed_ptr += row_head[:, None] * RANK + columns[None, :]
    tl.store(mixed_ptr, rounded(acc / total[:, None], mixed_ptr.dtype.element_ty), mask=is_place)


def attend_to_latents(
    shape: MLAShape,
    query: Tensor,  # [num_rows, num_heads, key_dim]
    kept: KeptLayer,  # whose keys are [num_slots, 1, capacity, entry_dim]
    table: CudaRowTable[Tensor],
    scratch: Scratch,
    mixed: Tensor,  # [num_rows, num_heads, rank]
    scale: float,
) -> None:
    """Attend with each row's heads to the entries that the row sees.

    Leaves padding rows unchanged, allocates nothing.
    """
    entries, scale_log2, strides = kept.keys, scale * SCALE_TO_LOG2, (kept.keys.stride(0), kept.keys.stride(2))
    bias, pages, *more_strides = kept.prefix_arguments()
    latent_prefix_split[(resident_programs(query.device, 1),)](  # shared memory allows no second
        query, entries, bias, pages, scratch.output, scratch.lse, table.groups,
        len(table.groups), scale_log2, *strides, *more_strides,
        **kept.prefix_constants(), **shape.prefix_constants(),
    )  # fmt: skip
    constants = shape.tail_constants()
    num_parts = triton.cdiv(shape.latent.rank, shape.tail_depth)
    latent_tail_merge[(shape.num_rows, triton.cdiv(shape.num_heads, TAIL_TILE_ROWS), num_parts)](
        query, entries, scratch.output, scratch.lse, mixed, table.rows, table.tail_slots, scale_log2, *strides,
        **constants,
    )  # fmt: skip


# Other kernels of latent attention: norms, rotation, and products per head.


TILE_ROWS = 64  # divides the number of rows
LEAST_WIDTH = tl.constexpr(LANES)  # divides all widths
EPSILON = 1e-6  # norms of latent vectors have this epsilon in all models


@triton.jit
def rope_halves(pointers, angles_ptr, mask, DIM: tl.constexpr, dtype: tl.constexpr):
    """Load the rotary dimensions of heads and return both halves rotated in float32, with angles as in `rope_store`."""
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
    NUM_ZEROS: tl.constexpr,
):  # fmt: skip
    """Program (row): stores its cache entry, from the last columns of `down`, and the queries' latent vector.

    Zeros follow in place of the key that an indexer may store later.
    """
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
    first, second = rope_halves(down_ptr + RANK + spun, angles_ptr, is_spun, TURNED, dtype)
    store_halves(entry_ptr + RANK + spun, first, second, is_spun, TURNED)
    if NUM_ZEROS:
        for start in range(RANK + TURNED, RANK + TURNED + NUM_ZEROS, LEAST_WIDTH):
            tl.store(entry_ptr + start + tl.arange(0, LEAST_WIDTH), tl.zeros([LEAST_WIDTH], dtype))


@triton.jit
def rope_heads(input_ptr, row_ptr, angles_ptr, out_ptr, TURNED: tl.constexpr, SPUN: tl.constexpr, dtype: tl.constexpr):
    """Rotate the rotary part of one head of all rows."""
    spun = tl.arange(0, SPUN)[None, :]
    mask = (tl.load(row_ptr + 2) > 0)[:, None] & (spun < TURNED // 2)
    angles = angles_ptr + tl.load(row_ptr + 3).to(tl.int64)[:, None] * TURNED + spun
    first, second = rope_halves(input_ptr + spun, angles, mask, TURNED, dtype)
    store_halves(out_ptr + spun, first, second, mask, TURNED)


@triton.jit
def multiply_heads(
    input_ptr, weight_ptr, rows_ptr, angles_ptr, out_ptr,
    TILE_ROWS: tl.constexpr, NUM_HEADS: tl.constexpr, IN_ROW: tl.constexpr, DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr, TURNED: tl.constexpr, SPUN: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (head, columns, rows): multiplies the head's first numbers by its rows of the weight.

    A head's last program rotates the `TURNED` numbers that follow. The stride between heads of the input is `IN_ROW`
    numbers.
    """
    head, rows = tl.program_id(0), tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    input_ptr += rows.to(tl.int64)[:, None] * IN_ROW + head * (DEPTH + TURNED)
    out_ptr += (rows.to(tl.int64)[:, None] * NUM_HEADS + head) * (COLUMNS + TURNED)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    start_column = tl.program_id(1) * TILE_COLUMNS
    if TURNED and start_column >= COLUMNS:
        rope_heads(input_ptr + DEPTH, rows_ptr + rows * 5, angles_ptr, out_ptr + COLUMNS, TURNED, SPUN, dtype)
        return
    columns, depth = start_column + tl.arange(0, TILE_COLUMNS), tl.arange(0, BLOCK_DEPTH)
    known = tl.where(columns < COLUMNS, columns, 0)  # padding columns read column 0 and are not stored
    weight_ptr += (head.to(tl.int64) * COLUMNS + known)[None, :] * DEPTH + depth[:, None]
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        is_there = depth < DEPTH - start
        x = read(input_ptr + start + depth[None, :], is_there[None, :], DEPTH % BLOCK_DEPTH == 0)
        w = read(weight_ptr + start, is_there[:, None], DEPTH % BLOCK_DEPTH == 0)
        acc = dot(x, w, acc)
    tl.store(out_ptr + columns[None, :], rounded(acc, dtype), mask=(columns < COLUMNS)[None, :])


class CudaMLA:
    """Buffers of latent attention, and its launches around the attention itself."""

    def __init__(
        self, sizes: DecoderSizes, latent: MLASizes, linear: LinearKernel, device: torch.device, num_rows: int
    ) -> None:
        """Allocate buffers of zeros, because padding rows must not hold NaN."""
        self._sizes, self._latent, self._linear, self._num_rows = sizes, latent, linear, num_rows
        queries = sizes.num_heads * latent.query_dim
        of_vectors = queries if latent.query_rank else 0
        widths = ((latent.query_rank or queries) + latent.key_dim, latent.query_rank, of_vectors, sizes.found_width)
        self._down, self.vector, self._queries, self.found = (
            torch.zeros(num_rows, width, dtype=sizes.dtype, device=device) for width in widths
        )

    def narrowed(self, num_rows: int) -> CudaMLA:
        """Return the launches of forwards of fewer rows, in the first rows of the same buffers."""
        other = copy.copy(self)
        other._num_rows = num_rows
        for name in ("_down", "vector", "_queries", "found"):
            setattr(other, name, getattr(self, name)[:num_rows])
        return other

    def keep(
        self,
        weights: StackedMLA,
        down: AnyLinear,
        rows: Tensor,
        table: CudaRowTable[Tensor],
        angles: Tensor,
        kept: Tensor,
        query: Tensor,
    ) -> None:
        """Write the cache entries of `rows [num_rows, hidden]` to `kept [num_slots, 1, capacity, entry_dim]`.

        Also fill `query`. `query` is `[num_rows, num_heads, key_dim]`.
        """
        sizes, latent = self._sizes, self._latent
        self._linear(rows, down.weight, down.bias, self._down)
        keep_latent_row[(self._num_rows,)](
            self._down, angles, weights.query_norm, weights.key_norm, table.rows, self.vector, kept, EPSILON,
            kept.stride(0), kept.stride(2), **keep_constants(latent, self._down.shape[1], sizes.norm_form),
        )  # fmt: skip
        queries = self._down
        if weights.query is not None:
            self._linear(self.vector, weights.query.weight, weights.query.bias, self._queries)
            queries = self._queries
        self._multiply(queries, weights.key_up, table, angles, query, latent.rope_dim)

    def find_values(self, weights: StackedMLA, mixed: Tensor, table: CudaRowTable[Tensor]) -> None:
        """Map `mixed [num_rows, num_heads, rank]` to values `found [num_rows, num_heads * value_dim]`."""
        self._multiply(mixed.flatten(1), weights.value_up, table, None, self.found)

    def _multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        table: CudaRowTable[Tensor],
        angles: Tensor | None,
        out: Tensor,
        num_rotary_dims: int = 0,
    ) -> None:
        constants = head_constants(self._sizes.num_heads, weight, rows.shape[1], num_rotary_dims)
        num_tiles = triton.cdiv(constants["COLUMNS"], TILE_COLUMNS) + (num_rotary_dims > 0)
        grid = (self._sizes.num_heads, num_tiles, self._num_rows // TILE_ROWS)
        multiply_heads[grid](rows, weight, table.rows, angles, out, **constants)


def keep_constants(latent: MLASizes, down_width: int, form: NormForm) -> dict[str, int]:
    """Return the constants of `keep_latent_row`."""
    return {
        "DOWN": down_width,
        "QUERY_RANK": latent.query_rank,
        "RANK": latent.rank,
        "TURNED": latent.rope_dim,
        "QUERY_WIDTH": triton.next_power_of_2(max(1, latent.query_rank)),
        "WIDTH": triton.next_power_of_2(latent.rank),
        "SPUN": triton.next_power_of_2(latent.rope_dim // 2),
        "FORM": int(form),
        "NUM_ZEROS": latent.entry_dim - latent.key_dim,
    }


def head_constants(num_heads: int, weight: Tensor, row_width: int, num_rotary_dims: int) -> dict[str, Any]:
    """Return constants, warps and stages of `multiply_heads`."""
    return {
        "TILE_ROWS": TILE_ROWS,
        "NUM_HEADS": num_heads,
        "IN_ROW": row_width,
        "DEPTH": weight.shape[1],
        "COLUMNS": weight.shape[0] // num_heads,
        "TURNED": num_rotary_dims,
        "SPUN": triton.next_power_of_2(max(2, num_rotary_dims) // 2),
        "TILE_COLUMNS": TILE_COLUMNS,
        "BLOCK_DEPTH": BLOCK_DEPTH,
        "num_warps": 4 if weight.dtype == torch.bfloat16 else 8,
        "num_stages": 4,
    }
