"""Kernels of a layer besides products, attention and rotary positions: embedding, norms, the gate.

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
def embed_row(rows_ptr, token_ids_ptr, embedding_ptr, state_ptr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    embedded = tl.load(embedding_ptr + token_id * HIDDEN + columns, mask=is_real)
    tl.store(state_ptr + row * HIDDEN + columns, embedded, mask=is_real)


@triton.jit
def weighted(scaled, weight, dtype: tl.constexpr):
    """The end of an RMS norm, float32: both its roundings to the model's dtype."""
    return rounded(rounded(scaled, dtype) * weight.to(tl.float32), dtype)


@triton.jit
def add_norm_row(
    rows_ptr, state_ptr, delta_ptr, weight_ptr, normed_ptr, epsilon,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, HAS_DELTA: tl.constexpr,
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


def embed(rows: Tensor, token_ids: Tensor, embedding: Tensor, state: Tensor) -> None:
    """Rows of `embedding [vocab, hidden]` for `token_ids [NUM_ROWS]`, into `state [NUM_ROWS, hidden]`."""
    hidden = state.shape[1]
    embed_row[(NUM_ROWS,)](rows, token_ids, embedding, state, HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden))


def add_norm(rows: Tensor, state: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, normed: Tensor) -> None:
    """Add `delta [NUM_ROWS, hidden]` to `state`, and write the state's RMS norm times `weight [hidden]`."""
    hidden = state.shape[1]
    add_norm_row[(NUM_ROWS,)](
        rows, state, delta, weight, normed, epsilon,
        HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), HAS_DELTA=delta is not None,
    )  # fmt: skip


def silu_mul(rows: Tensor, gate_up: Tensor, gated: Tensor) -> None:
    """`[NUM_ROWS, 2 * intermediate]`, gates first, to `gated [NUM_ROWS, intermediate]`."""
    intermediate = gated.shape[1]
    grid = (NUM_ROWS, triton.cdiv(intermediate, GATE_COLUMNS))
    silu_mul_row[grid](rows, gate_up, gated, INTERMEDIATE=intermediate, COLUMNS=GATE_COLUMNS)
