"""Kernels of a layer besides products and attention: embedding, norms, the gate, and rotary positions.

They round where `transformers` rounds, as in `tests/worker/kernels/reference.py`. A program sees one row. Padding
rows, whose tail has length 0 in `rows [NUM_ROWS, 5]` of the table, stay as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import NUM_ROWS
from swiftbatch.worker.kernels.cuda.rounding import rounded

GATE_COLUMNS = 1024  # of a program


@triton.jit
def is_padding(rows_ptr, row):
    """Whether nothing is to be done for a row."""
    return tl.load(rows_ptr + row * 5 + 2) == 0


@triton.jit
def embed_row(
    rows_ptr, token_ids_ptr, embedding_ptr, state_ptr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """Program (row)."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    embedded = tl.load(embedding_ptr + token_id * HIDDEN + columns, mask=is_real)
    if SCALE != 1.0:
        embedded = (embedded.to(tl.float32) * SCALE).to(state_ptr.dtype.element_ty)
    tl.store(state_ptr + row * HIDDEN + columns, embedded, mask=is_real)


@triton.jit
def weighted(scaled, weight, dtype: tl.constexpr):
    """The end of an RMS norm, float32: both its roundings to the model's dtype."""
    return rounded(rounded(scaled, dtype) * weight.to(tl.float32), dtype)


@triton.jit
def add_norm_row(
    rows_ptr, state_ptr, delta_ptr, weight_ptr, normed_ptr, epsilon,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, HAS_DELTA: tl.constexpr, DELTA_SCALE: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    if is_padding(rows_ptr, tl.program_id(0)):
        return
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    places = tl.program_id(0) * HIDDEN + columns
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    state = tl.load(state_ptr + places, mask=is_real, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + places, mask=is_real, other=0.0).to(tl.float32)
        if DELTA_SCALE != 1.0:
            delta = rounded(delta * DELTA_SCALE, dtype)
        state = rounded(state + delta, dtype)
        tl.store(state_ptr + places, state, mask=is_real)
    scale = tl.rsqrt(tl.sum(state * state, 0) / HIDDEN + epsilon)
    weight = tl.load(weight_ptr + columns, mask=is_real, other=0.0)
    tl.store(normed_ptr + places, weighted(state * scale, weight, dtype), mask=is_real)


@triton.jit
def silu_mul_row(rows_ptr, gate_up_ptr, gated_ptr, INTERMEDIATE: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, columns)."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = columns < INTERMEDIATE
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * 2 * INTERMEDIATE + columns, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * INTERMEDIATE + columns, mask=is_real, other=0.0).to(tl.float32)
    gate = rounded(gate / (1 + tl.exp(-gate)), dtype)
    tl.store(gated_ptr + row * INTERMEDIATE + columns, rounded(gate * up, dtype), mask=is_real)


def embed(rows: Tensor, token_ids: Tensor, embedding: Tensor, state: Tensor, scale: float = 1.0) -> None:
    """Write rows of `embedding [vocab, hidden]` for `token_ids [NUM_ROWS]`, scaled, to `state [NUM_ROWS, hidden]`."""
    hidden = state.shape[1]
    embed_row[(NUM_ROWS,)](
        rows, token_ids, embedding, state, HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), SCALE=scale
    )


def add_norm(
    rows: Tensor,
    state: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    epsilon: float,
    normed: Tensor,
    delta_scale: float = 1.0,
) -> None:
    """Add `delta [NUM_ROWS, hidden]`, scaled, to `state`, and write the state's RMS norm times `weight [hidden]`."""
    hidden = state.shape[1]
    add_norm_row[(NUM_ROWS,)](
        rows, state, delta, weight, normed, epsilon,
        HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), HAS_DELTA=delta is not None,
        DELTA_SCALE=delta_scale,
    )  # fmt: skip


def silu_mul(rows: Tensor, gate_up: Tensor, gated: Tensor) -> None:
    """`[NUM_ROWS, 2 * intermediate]`, gates first, to `gated [NUM_ROWS, intermediate]`."""
    intermediate = gated.shape[1]
    grid = (NUM_ROWS, triton.cdiv(intermediate, GATE_COLUMNS))
    silu_mul_row[grid](rows, gate_up, gated, INTERMEDIATE=intermediate, COLUMNS=GATE_COLUMNS)


@triton.jit
def normed(first, second, norm_ptr, mask, epsilon, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """RMS norm of heads by halves; each has its own weights at `norm_ptr`."""
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + epsilon)[:, None]
    first_weight = tl.load(norm_ptr, mask=mask, other=0.0)
    second_weight = tl.load(norm_ptr + HEAD_DIM // 2, mask=mask, other=0.0)
    return weighted(first * scale, first_weight, dtype), weighted(second * scale, second_weight, dtype)


@triton.jit
def store_halves(pointers, first, second, mask, HEAD_DIM: tl.constexpr):
    tl.store(pointers, first, mask=mask)
    tl.store(pointers + HEAD_DIM // 2, second, mask=mask)


@triton.jit
def packed_head(packed_ptr, row, index, kv_head, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr):
    """The place of heads among those of all groups: the heads of a KV head are rows of it, as flash-attn takes them."""
    return (tl.load(packed_ptr + row) * HEADS_PER_KV + index) * NUM_KV_HEADS + kv_head


@triton.jit
def rope_store_heads(
    qkv_ptr, angles_ptr, query_norm_ptr, key_norm_ptr, rows_ptr, packed_ptr, query_ptr, keys_ptr, values_ptr,
    epsilon, stride_slot, stride_head, stride_entry,
    NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_PACKED: tl.constexpr, TILE_HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head): the heads of queries that see it, then its key, then its value."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    row_ptr = rows_ptr + row * 5
    if tl.load(row_ptr + 2) == 0:
        return
    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    index = tl.arange(0, TILE_HEADS)
    is_query = (index < HEADS_PER_KV)[:, None]
    is_value = (index == HEADS_PER_KV + 1)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    is_column = columns < HEAD_DIM // 2
    is_real = (index < HEADS_PER_KV + 2)[:, None] & is_column
    query_head = kv_head * HEADS_PER_KV + index
    head = tl.where(index < HEADS_PER_KV, query_head, num_heads + kv_head + (index - HEADS_PER_KV) * NUM_KV_HEADS)
    qkv_ptr += (row * (num_heads + 2 * NUM_KV_HEADS) + head)[:, None] * HEAD_DIM + columns
    given_first = tl.load(qkv_ptr, mask=is_real, other=0.0).to(tl.float32)
    given_second = tl.load(qkv_ptr + HEAD_DIM // 2, mask=is_real, other=0.0).to(tl.float32)
    first = given_first
    second = given_second
    if HAS_NORM:
        norm_ptr = tl.where(is_query, query_norm_ptr, key_norm_ptr) + columns
        first, second = normed(first, second, norm_ptr, is_real, epsilon, HEAD_DIM, dtype)
    angles_ptr += tl.load(row_ptr + 3).to(tl.int64) * HEAD_DIM + columns
    cosines = tl.load(angles_ptr, mask=is_column, other=0.0).to(tl.float32)
    sines = tl.load(angles_ptr + HEAD_DIM // 2, mask=is_column, other=0.0).to(tl.float32)
    turned_first = rounded(tl.where(is_value, given_first, first * cosines - second * sines), dtype)
    turned_second = rounded(tl.where(is_value, given_second, second * cosines + first * sines), dtype)

    place = row * num_heads + query_head
    if IS_PACKED:
        place = packed_head(packed_ptr, row, index, kv_head, NUM_KV_HEADS, HEADS_PER_KV)
    query_ptr += place[:, None] * HEAD_DIM + columns
    store_halves(query_ptr, turned_first, turned_second, is_query & is_real, HEAD_DIM)
    place = tl.load(row_ptr).to(tl.int64) * stride_slot + kv_head.to(tl.int64) * stride_head
    place += tl.load(row_ptr + 4).to(tl.int64) * stride_entry
    places = place + index[:, None] * 0 + columns
    is_key = (index == HEADS_PER_KV)[:, None]
    store_halves(keys_ptr + places, turned_first, turned_second, is_key & is_real, HEAD_DIM)
    store_halves(values_ptr + places, turned_first, turned_second, is_value & is_real, HEAD_DIM)


def rope_store(
    qkv: Tensor,  # [NUM_ROWS, (num_heads + 2 * num_kv_heads) * head_dim]
    angles: Tensor,  # [num_angles, head_dim]: cosines of half a head's dimensions, then sines
    norms: tuple[Tensor, Tensor] | None,  # weights [head_dim] of queries and of keys
    epsilon: float,
    rows: Tensor,  # of a row table
    query: Tensor,  # [NUM_ROWS, num_heads, head_dim]; packed: [num_groups * rows_per_group, num_heads, head_dim]
    keys: Tensor,  # [num_slots, num_kv_heads, capacity, head_dim], one layer of the arena
    values: Tensor,  # as keys, with the same strides
    packed: Tensor | None = None,  # of a row table: where queries go, their heads as in `packed_head`; None: in order
) -> None:
    """Write turned queries, and turned keys and values to the entries of their rows; of padding rows nothing."""
    _, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    query_norm, key_norm = (None, None) if norms is None else norms
    rope_store_heads[(NUM_ROWS, num_kv_heads)](
        qkv, angles, query_norm, key_norm, rows, packed, query, keys, values, epsilon, *keys.stride()[:3],
        HAS_NORM=norms is not None, IS_PACKED=packed is not None,
        **rope_constants(num_kv_heads, num_heads // num_kv_heads, head_dim),
    )  # fmt: skip


def rope_constants(num_kv_heads: int, heads_per_kv: int, head_dim: int) -> dict[str, int]:
    """Return the constants of `rope_store_heads`, with its warps."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "HEADS_PER_KV": heads_per_kv,
        "HEAD_DIM": head_dim,
        "TILE_HEADS": triton.next_power_of_2(heads_per_kv + 2),
        "WIDTH": triton.next_power_of_2(head_dim // 2),
        "num_warps": 2,
    }
