"""Draft model kernels besides a decoder layer's. A program handles one row and leaves padding rows alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.row_kernels import ACTIVE_COLUMNS, is_padding, root_mean
from swiftbatch.worker.kernels.cuda.triton_primitives import rounded
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS

LAYER_NORM_EPSILON = tl.constexpr(1e-5)
NORM_WARPS = 8
THREAD_NUMBERS = 32  # numbers of a joined row per thread


@triton.jit
def pair_row(
    rows_ptr, token_ids_ptr, feature_places_ptr, features_ptr, embedding_ptr, pairs_ptr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    place = tl.load(feature_places_ptr + row * 2).to(tl.int64)
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    feature = tl.load(features_ptr + place * HIDDEN + columns, mask=is_real)
    embedded = tl.load(embedding_ptr + token_id * HIDDEN + columns, mask=is_real)
    tl.store(pairs_ptr + row * 2 * HIDDEN + columns, feature, mask=is_real)
    tl.store(pairs_ptr + (row * 2 + 1) * HIDDEN + columns, embedded, mask=is_real)


@triton.jit
def layer_norm_row(
    rows_ptr, source_ptr, weight_ptr, bias_ptr, out_ptr, source_stride, out_stride,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Normalise a row to mean 0 and variance 1, apply weight and bias, round once."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    source = tl.load(source_ptr + row * source_stride + columns, mask=is_real, other=0.0).to(tl.float32)
    centred = tl.where(is_real, source - tl.sum(source, 0) / HIDDEN, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / HIDDEN + LAYER_NORM_EPSILON)
    weight = tl.load(weight_ptr + columns, mask=is_real, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=is_real, other=0.0).to(tl.float32)
    normed = rounded(centred * scale * weight + bias, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, normed, mask=is_real)


@triton.jit
def silu_row(rows_ptr, expanded_ptr, EXPANSION: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = columns < EXPANSION
    places = row * EXPANSION + columns
    x = tl.load(expanded_ptr + places, mask=is_real, other=0.0).to(tl.float32)
    tl.store(expanded_ptr + places, rounded(x / (1 + tl.exp(-x)), expanded_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def add_row(rows_ptr, state_ptr, delta_ptr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    places = row * HIDDEN + columns
    state = tl.load(state_ptr + places, mask=is_real, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + places, mask=is_real, other=0.0).to(tl.float32)
    tl.store(state_ptr + places, rounded(state + delta, state_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def keep_row(rows_ptr, feature_places_ptr, regressed_ptr, features_ptr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """Write a row's regressed feature to the row's own place, unless that is -1."""
    row = tl.program_id(0)
    place = tl.load(feature_places_ptr + row * 2 + 1).to(tl.int64)
    if is_padding(rows_ptr, row) | (place < 0):
        return
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    regressed = tl.load(regressed_ptr + row * HIDDEN + columns, mask=is_real)
    tl.store(features_ptr + place * HIDDEN + columns, regressed, mask=is_real)


@triton.jit
def join_row(
    rows_ptr, token_ids_ptr, feature_places_ptr, features_ptr, embedding_ptr, token_norm_ptr, hidden_norm_ptr,
    pairs_ptr, epsilon, HIDDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write one half of a row: the token's embedding, or the feature of the position before the token.

    Each half passes an RMS norm with float32 weights and is rounded once.
    """
    row = tl.program_id(0)
    half = tl.program_id(1)
    if is_padding(rows_ptr, row):
        return
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    source_ptr = embedding_ptr + tl.load(token_ids_ptr + row).to(tl.int64) * HIDDEN
    weight_ptr = token_norm_ptr
    if half == 1:
        source_ptr = features_ptr + tl.load(feature_places_ptr + row * 2).to(tl.int64) * HIDDEN
        weight_ptr = hidden_norm_ptr
    source = tl.load(source_ptr + columns, mask=is_real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=is_real, other=0.0)
    normed = rounded(source * root_mean(source, HIDDEN, epsilon) * weight, pairs_ptr.dtype.element_ty)
    tl.store(pairs_ptr + (row * 2 + half) * HIDDEN + columns, normed, mask=is_real)


def pair(rows: Tensor, token_ids: Tensor, places: Tensor, features: Tensor, embedding: Tensor, pairs: Tensor) -> None:
    """Join `features [num_places, hidden]` at the first of `places [NUM_ROWS, 2]` with rows of `embedding`.

    Writes `pairs [NUM_ROWS, 2 * hidden]`.
    """
    sizes = _sizes(embedding.shape[1])
    pair_row[(NUM_ROWS,)](rows, token_ids, places, features, embedding, pairs, **sizes)


def layer_norm(rows: Tensor, source: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """Write the LayerNorm of `source [NUM_ROWS, hidden]` to `out`; both may be columns of wider buffers."""
    layer_norm_row[(NUM_ROWS,)](
        rows, source, weight, bias, out, source.stride(0), out.stride(0),
        num_warps=NORM_WARPS, **_sizes(len(weight)),
    )  # fmt: skip


def silu(rows: Tensor, expanded: Tensor) -> None:
    expansion = expanded.shape[1]
    grid = (NUM_ROWS, triton.cdiv(expansion, ACTIVE_COLUMNS))
    silu_row[grid](rows, expanded, EXPANSION=expansion, COLUMNS=ACTIVE_COLUMNS)


def add(rows: Tensor, state: Tensor, delta: Tensor) -> None:
    add_row[(NUM_ROWS,)](rows, state, delta, **_sizes(state.shape[1]))


def keep(rows: Tensor, places: Tensor, regressed: Tensor, features: Tensor) -> None:
    """Write `regressed [NUM_ROWS, hidden]` to `features [num_places, hidden]`, at the second of each row's places."""
    keep_row[(NUM_ROWS,)](rows, places, regressed, features, **_sizes(regressed.shape[1]))


def join(
    rows: Tensor,
    token_ids: Tensor,
    places: Tensor,
    features: Tensor,
    embedding: Tensor,
    token_norm: Tensor,
    hidden_norm: Tensor,
    epsilon: float,
    pairs: Tensor,
) -> None:
    """Norm and join rows of `embedding` with `features [num_places, hidden]` at the first of `places [NUM_ROWS, 2]`.

    Writes `pairs [NUM_ROWS, 2 * hidden]`; both norms' weights are `[hidden] float32`.
    """
    join_row[(NUM_ROWS, 2)](
        rows, token_ids, places, features, embedding, token_norm, hidden_norm, pairs, epsilon,
        **join_constants(embedding.shape[1]),
    )  # fmt: skip


def join_constants(hidden: int) -> dict[str, int]:
    """Return the constants of `join_row` with enough warps that threads do not spill."""
    sizes = _sizes(hidden)
    return sizes | {"num_warps": max(1, sizes["WIDTH"] // 32 // THREAD_NUMBERS)}


def _sizes(hidden: int) -> dict[str, int]:
    return {"HIDDEN": hidden, "WIDTH": triton.next_power_of_2(hidden)}
