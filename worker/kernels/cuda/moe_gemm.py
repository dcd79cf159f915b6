"""Experts on a GPU in six launches; each row sums its experts in the order in which it chose them.

All tiles have the same height and order of sums, so a row's bits do not depend on other rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.gemm import (
    FEW_TILE_COLUMNS,
    TILE_COLUMNS,
    LinearKernel,
    form_constants,
    read,
    weight_arguments,
    weight_block,
)
from swiftbatch.worker.kernels.cuda.moe_router import (
    ROUTER_COLUMNS,
    ROUTER_ROWS,
    TILE,
    choice_constants,
    choose_row,
    multiply_router,
    num_parts,
    num_tiles,
    router_constants,
    sort_choices,
    sort_constants,
)
from swiftbatch.worker.kernels.cuda.peers import Launch, Peers
from swiftbatch.worker.kernels.cuda.row_kernels import activated, gated, is_padding
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedExperts
from swiftbatch.worker.kernels.cuda.triton_primitives import dot, rounded
from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH, NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import Activation
from swiftbatch.worker.kernels.quantized_weights import AnyLinear

SUMMED_COLUMNS = 1024


@triton.jit
def multiply_tile(
    input_ptr, tile_experts_ptr, tile_pairs_ptr, weight_ptr, codes_ptr, scales_ptr, offsets_ptr, bias_ptr, out_ptr,
    peers_ptr, num_columns, stride_group, PAIRS_PER_ROW: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, TILE_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, IS_PACKED: tl.constexpr,
    DECODE: tl.constexpr, ASSEMBLY: tl.constexpr, PLACES: tl.constexpr, ZERO: tl.constexpr, FACTOR: tl.constexpr,
    PADDED_DEPTH: tl.constexpr, GROUP: tl.constexpr, IS_NARROW: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    IS_GATED: tl.constexpr, IS_ACTIVATED: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr,
    SLOPE: tl.constexpr, FIRST: tl.constexpr, NUM_OWN: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):  # fmt: skip
    """Program (columns, tile): computes an expert's columns for the rows that chose this expert.

    One of several GPUs has the `NUM_OWN` experts from `FIRST` on, and the one that owns a row gets its results.
    """
    expert = tl.load(tile_experts_ptr + tl.program_id(1)) - FIRST
    if expert < 0 or expert >= NUM_OWN:
        return
    pairs = tl.load(tile_pairs_ptr + tl.program_id(1) * TILE + tl.arange(0, TILE))
    rows = tl.maximum(pairs, 0) // PAIRS_PER_ROW  # padding reads row 0, and is not stored
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    first = expert.to(tl.int64) * num_columns
    depth = tl.arange(0, BLOCK_DEPTH)
    input_ptr += rows[None, :] * DEPTH + depth[:, None]
    acc = tl.zeros([TILE_COLUMNS, TILE], tl.float32)
    for start in range(0, DEPTH, BLOCK_DEPTH):
        x = read(input_ptr + start, (depth < DEPTH - start)[:, None], DEPTH % BLOCK_DEPTH == 0)
        w = weight_block(
            weight_ptr, codes_ptr, scales_ptr, offsets_ptr, first, columns, num_columns, start, stride_group, x.dtype,
            TILE_COLUMNS, DEPTH, BLOCK_DEPTH, IS_PACKED, DECODE, ASSEMBLY, PLACES, ZERO, FACTOR,
            PADDED_DEPTH, GROUP, IS_NARROW, HAS_OFFSETS,
        )  # fmt: skip
        acc = dot(w, x, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + first + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    width, wide = num_columns, rounded(acc, dtype)
    if IS_GATED:
        gate, up = tl.split(wide.reshape([TILE_COLUMNS // 2, 2, TILE]).permute(0, 2, 1))
        wide = rounded(gated(gate, up, None, dtype, ACTIVATION, LIMIT, SLOPE), dtype)
        columns = tl.program_id(0) * (TILE_COLUMNS // 2) + tl.arange(0, TILE_COLUMNS // 2)
        width = num_columns // 2
    elif IS_ACTIVATED:
        wide = rounded(activated(wide, None, ACTIVATION), dtype)
    is_place = (columns < width)[:, None] & (pairs >= 0)[None, :]
    if NUM_RANKS > 1:
        out_ptr += tl.load(peers_ptr + tl.maximum(pairs, 0) // NUM_CHOSEN % NUM_RANKS)[None, :]
    tl.store(out_ptr + pairs.to(tl.int64)[None, :] * width + columns[:, None], wide, mask=is_place)


@triton.jit
def sum_choices(
    rows_ptr, results_ptr, choice_weights_ptr, shares_ptr, out_ptr,
    HIDDEN: tl.constexpr, NUM_CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_SHARE: tl.constexpr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
):  # fmt: skip
    """Program (row, columns): sums the results of the row's experts in order, then adds the shared expert's."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row) or row % NUM_RANKS != RANK:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros([COLUMNS], tl.float32)
    for pair in range(row * NUM_CHOSEN, (row + 1) * NUM_CHOSEN):
        result = tl.load(results_ptr + pair * HIDDEN + columns, mask=is_column, other=0.0).to(tl.float32)
        total += result * tl.load(choice_weights_ptr + pair)
    total = rounded(total, dtype)
    out_ptr += row * HIDDEN + columns
    if HAS_SHARED:
        shared = tl.load(out_ptr, mask=is_column, other=0.0).to(tl.float32)
        if HAS_SHARE:
            shared = rounded(shared * tl.load(shares_ptr + row), dtype)
        total = rounded(shared + total, dtype)
    tl.store(out_ptr, total, mask=is_column)


class CudaExperts:
    """Buffers of experts, shared by layers.

    `met [num_rows + 1, 2]`, indexed by the number of rows without padding, counts layers and the experts used in them.
    """

    def __init__(
        self,
        layers: Sequence[StackedExperts],
        hidden: int,
        dtype: torch.dtype,
        activation: Activation,
        device: Any,
        linear: LinearKernel,
        num_rows: int = NUM_ROWS,
    ) -> None:
        routings = [each.routing for each in layers]
        num_pairs = num_rows * max(each.num_chosen for each in routings)
        num_columns = max(len(each.router) for each in layers)
        most_tiles = max(num_tiles(each.num_experts, each.num_chosen, num_rows) for each in routings)
        self._hidden, self._dtype, self._activation, self._num_rows = hidden, dtype, activation, num_rows
        self._parts = torch.zeros(num_parts(hidden) * num_rows * num_columns, device=device)
        self._marks = torch.zeros(num_rows * num_columns, dtype=torch.int32, device=device)
        self._weights = torch.zeros(num_pairs, device=device)
        self._shares = torch.zeros(num_rows, device=device)
        self._tile_experts = torch.zeros(most_tiles, dtype=torch.int32, device=device)
        self._tile_pairs = torch.zeros(most_tiles * TILE, dtype=torch.int32, device=device)
        self.met = torch.zeros(num_rows + 1, 2, dtype=torch.int64, device=device)
        width = max(each.intermediate for each in layers)
        self._activated = torch.zeros(num_pairs * width, dtype=dtype, device=device)
        self.results = torch.zeros(num_pairs * hidden, dtype=dtype, device=device)
        self._linear, latent = linear, max(each.latent_width for each in layers)
        self._read, self._sums = (torch.zeros(num_rows * latent, dtype=dtype, device=device) for _ in range(2))
        self._from_latent = torch.zeros(num_rows * bool(latent), hidden, dtype=dtype, device=device)

    def narrowed(self, num_rows: int) -> CudaExperts:
        """Return the experts of forwards of fewer rows, in the same memory."""
        other = copy.copy(self)
        other._num_rows, other._from_latent = num_rows, self._from_latent[:num_rows]
        return other

    def launches(
        self, rows: Tensor, experts: StackedExperts, normed: Tensor, out: Tensor, has_shared: bool, peers: Peers | None
    ) -> Iterator[Launch]:
        """Yield launches that write `out [num_rows, hidden]` for rows `normed`, which have chosen their experts.

        With `has_shared`, it has the shared expert's result. Of several GPUs, each sums its own rows.
        """
        if experts.latent is None:
            yield from self._of_rows(rows, experts, normed, out, has_shared, peers)
            return
        into, behind = experts.latent
        shape = (self._num_rows, experts.latent_width)
        read, sums = (each[: shape[0] * shape[1]].view(shape) for each in (self._read, self._sums))
        yield partial(self._linear, normed, into.weight, into.bias, read)
        yield from self._of_rows(rows, experts, read, sums, False, peers)
        yield partial(self._linear, sums, behind.weight, behind.bias, self._from_latent if has_shared else out)
        if has_shared:
            yield partial(out.add_, self._from_latent)

    def _of_rows(
        self,
        rows: Tensor,
        experts: StackedExperts,
        read: Tensor,
        out: Tensor,
        has_shared: bool,
        peers: Peers | None,
    ) -> Iterator[Launch]:
        yield partial(self._multiply, experts, experts.gate_up, read, self._activated, True)
        yield partial(self._multiply, experts, experts.down, self._activated, self.results, False, peers)
        if peers is not None:
            yield peers.meeting
        yield partial(self._sum, rows, experts, out, has_shared, peers)

    def _sum(self, rows: Tensor, experts: StackedExperts, out: Tensor, has_shared: bool, peers: Peers | None) -> None:
        width = out.shape[1]
        sum_choices[(self._num_rows, triton.cdiv(width, SUMMED_COLUMNS))](
            rows, self.results, self._weights, self._shares, out, HIDDEN=width, NUM_CHOSEN=experts.routing.num_chosen,
            COLUMNS=SUMMED_COLUMNS, HAS_SHARED=has_shared, HAS_SHARE=has_shared and experts.has_share,
            RANK=0 if peers is None else peers.rank.number, NUM_RANKS=1 if peers is None else peers.rank.num_ranks,
        )  # fmt: skip

    def choose(self, rows: Tensor, experts: StackedExperts, normed: Tensor) -> None:
        """Choose experts by what the router reads of each row, `normed [num_rows, hidden]`."""
        routing, num_columns, num_rows = experts.routing, len(experts.router), self._num_rows
        grid = (triton.cdiv(num_columns, ROUTER_COLUMNS), num_parts(self._hidden), num_rows // ROUTER_ROWS)
        multiply_router[grid](
            normed, experts.router, self._parts, **router_constants(self._hidden, num_columns, num_rows)
        )
        has_biases = experts.router_bias is not None, experts.choice_bias is not None
        choose_row[(num_rows,)](
            rows, self._parts, experts.router_bias, experts.choice_bias, experts.choice_scales, self._marks,
            self._weights, self._shares,
            **choice_constants(routing, self._hidden, self._dtype, *has_biases, experts.has_share, num_rows),
        )  # fmt: skip
        sort_choices[(1,)](
            rows, self._marks, self._tile_experts, self._tile_pairs, self.met, **sort_constants(routing, num_rows)
        )

    def _multiply(
        self,
        experts: StackedExperts,
        linear: AnyLinear,
        rows: Tensor,
        out: Tensor,
        is_first: bool,
        peers: Peers | None = None,
    ) -> None:
        """Multiply with all experts, and activate what the first of their products finds."""
        routing, num_columns = experts.routing, linear.weight.shape[0] // experts.num_own
        most_tiles = num_tiles(routing.num_experts, routing.num_chosen, self._num_rows)
        constants = tile_constants(experts, linear, is_first, self._activation)
        constants["NUM_RANKS"] = 1 if peers is None else peers.rank.num_ranks
        distances = None if peers is None else peers.of(out)
        pointers, stride = weight_arguments(linear.weight)
        grid = (triton.cdiv(num_columns, constants["TILE_COLUMNS"]), most_tiles)
        multiply_tile[grid](
            rows, self._tile_experts, self._tile_pairs, *pointers, linear.bias, out, distances, num_columns, stride,
            **constants,
        )  # fmt: skip


def tile_constants(
    experts: StackedExperts, linear: AnyLinear, is_first: bool, activation: Activation
) -> dict[str, Any]:
    """Return constants, warps and stages of `multiply_tile`, for one GPU."""
    weight, routing, gates = linear.weight, experts.routing, experts if is_first else None
    return form_constants(weight) | {
        "PAIRS_PER_ROW": 1 if gates is None else routing.num_chosen,
        "TILE": TILE,
        "DEPTH": weight.shape[1],
        "HAS_BIAS": linear.bias is not None,
        "TILE_COLUMNS": TILE_COLUMNS if weight.dtype.itemsize > 2 else FEW_TILE_COLUMNS,
        "BLOCK_DEPTH": BLOCK_DEPTH,
        "IS_GATED": gates is not None and gates.has_gates,
        "IS_ACTIVATED": gates is not None,
        "ACTIVATION": int(activation),
        "LIMIT": 0.0 if gates is None else gates.gate_limit,
        "SLOPE": 0.0 if gates is None else gates.gate_slope,
        "FIRST": experts.first,
        "NUM_OWN": experts.num_own,
        "NUM_CHOSEN": routing.num_chosen,
        "NUM_RANKS": 1,
        "num_warps": 4,
        "num_stages": 4,
    }
