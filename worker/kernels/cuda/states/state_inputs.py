"""The inputs of rows to their layer's state: a convolution over their own path, then keys, values, factors.

An input of a row that shares the forward is read where the product has left it; those of earlier rows lie among the
steps. Rows are rounded where the kernels in C round, which is where `transformers` does.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import BLOCK
from swiftbatch.worker.kernels.cuda.rounding import rounded
from swiftbatch.worker.kernels.cuda.states.state_table import StateTable
from swiftbatch.worker.kernels.cuda.states.step_layout import StepLayout
from swiftbatch.worker.kernels.mixer_sizes import MixerForm, MixerSizes

DELTA_NET, CONVOLUTION = tl.constexpr(int(MixerForm.DELTA_NET)), tl.constexpr(int(MixerForm.CONVOLUTION))
LENGTH_EPSILON = tl.constexpr(1e-6)  # of queries' and keys' lengths in delta nets
GATED_COLUMNS = 1024  # of a program


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x); what 1 + e^x loses of e^x is added again."""
    power = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + power
    return tl.where(x > 20.0, x, tl.log(more) + (power - (more - 1.0)) / more)


@triton.jit
def input_of(wide_ptr, row, channels, is_real, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr):
    """A row's input of the convolution, as it is kept; in short convolutions behind a gate of its own."""
    wide_ptr += row * COLUMNS + channels
    x = tl.load(wide_ptr, mask=is_real, other=0.0).to(tl.float32)
    if FORM == CONVOLUTION:
        gate = tl.load(wide_ptr + 2 * CHANNELS, mask=is_real, other=0.0).to(tl.float32)
        x = rounded(x * gate, wide_ptr.dtype.element_ty)
    return x


@triton.jit
def convolved(
    rows_ptr, paths_ptr, wide_ptr, taps_ptr, tap_bias_ptr, inputs_ptr, row, channels, is_real,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr, HAS_TAP_BIAS: tl.constexpr,
    FORM: tl.constexpr, RING: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The convolution of a row's channels, rounded, from the oldest input on; the row's own input is kept."""
    slot, boundary, length = (
        tl.load(rows_ptr + row * 5),
        tl.load(rows_ptr + row * 5 + 1),
        tl.load(rows_ptr + row * 5 + 2),
    )
    first_entry, first_row = tl.load(rows_ptr + row * 5 + 3), tl.load(rows_ptr + row * 5 + 4)
    inputs_ptr += slot.to(tl.int64) * (RING * STEP)
    dtype: tl.constexpr = wide_ptr.dtype.element_ty
    total = tl.zeros(channels.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        place = length - TAPS + tap
        entry = tl.load(paths_ptr + row * BLOCK + tl.maximum(place, 0))
        entry = tl.where(place < 0, boundary + place, entry)
        is_here = entry >= first_entry
        here = input_of(wide_ptr, tl.where(is_here, entry - first_entry + first_row, row), channels, is_real,
                        CHANNELS, COLUMNS, FORM)  # fmt: skip
        is_kept = is_real & (entry >= 0) & (entry < first_entry)
        kept = tl.load(inputs_ptr + (entry % RING) * STEP + channels, mask=is_kept, other=0.0).to(tl.float32)
        weight = tl.load(taps_ptr + tap * CHANNELS + channels, mask=is_real, other=0.0)
        total += tl.where(is_here, here, kept) * weight
        if tap == TAPS - 1:
            tl.store(inputs_ptr + (entry % RING) * STEP + channels, here, mask=is_real)
    if HAS_TAP_BIAS:
        total += tl.load(tap_bias_ptr + channels, mask=is_real, other=0.0)
    return rounded(total, dtype)


@triton.jit
def step_factors(
    narrow_ptr, rates_ptr, step_bias_ptr, row, head, NUM_HEADS: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """The share that a row's value has in its head's update, and the logarithm of the state's decay."""
    dtype: tl.constexpr = narrow_ptr.dtype.element_ty
    rate, bias = tl.load(rates_ptr + head), tl.load(step_bias_ptr + head)
    if FORM == DELTA_NET:
        share = rounded(sigmoid(tl.load(narrow_ptr + row * (2 * NUM_HEADS) + head).to(tl.float32)), dtype)
        step = softplus(tl.load(narrow_ptr + row * (2 * NUM_HEADS) + NUM_HEADS + head).to(tl.float32) + bias)
        return share, -rate * step
    number = rounded(tl.load(narrow_ptr + row * NUM_HEADS + head).to(tl.float32) + bias, dtype)
    step = rounded(softplus(number), dtype)
    step = tl.where(step < LEAST, LEAST, step)
    step = tl.where(step > MOST, MOST, step)
    return rounded(step, dtype), -rate * step


@triton.jit
def ready_head(
    rows_ptr, paths_ptr, wide_ptr, narrow_ptr, taps_ptr, tap_bias_ptr, rates_ptr, step_bias_ptr,
    inputs_ptr, steps_ptr, queries_ptr, values_ptr, own_ptr, shares_ptr,
    NUM_HEADS: tl.constexpr, NUM_KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr, HAS_TAP_BIAS: tl.constexpr,
    FORM: tl.constexpr, RING: tl.constexpr, STEP: tl.constexpr, WORDS: tl.constexpr, DECAYS: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, head of queries, of keys or of values): its numbers go to buffers, its key and decay to steps."""
    row, part = tl.program_id(0), tl.program_id(1)
    length = tl.load(rows_ptr + row * 5 + 2)
    if length == 0:
        return
    # In a delta net channels are of queries, keys and values; in Mamba-2 of values, keys and queries.
    is_value = part >= 2 * NUM_KEY_HEADS if FORM == DELTA_NET else part < NUM_HEADS
    is_query = part < NUM_KEY_HEADS if FORM == DELTA_NET else part >= NUM_HEADS + NUM_KEY_HEADS
    head = part - 2 * NUM_KEY_HEADS if FORM == DELTA_NET else part
    key_head = part % NUM_KEY_HEADS if FORM == DELTA_NET else (part - NUM_HEADS) % NUM_KEY_HEADS
    first = part * KEY_DIM if FORM == DELTA_NET else NUM_HEADS * VALUE_DIM + (part - NUM_HEADS) * KEY_DIM
    if is_value:
        first = 2 * NUM_KEY_HEADS * KEY_DIM + head * VALUE_DIM if FORM == DELTA_NET else part * VALUE_DIM
    columns = tl.arange(0, WIDTH)
    is_real = columns < tl.where(is_value, VALUE_DIM, KEY_DIM)
    x = convolved(
        rows_ptr, paths_ptr, wide_ptr, taps_ptr, tap_bias_ptr, inputs_ptr, row, first + columns, is_real,
        CHANNELS, COLUMNS, TAPS, HAS_TAP_BIAS, FORM, RING, STEP, BLOCK,
    )  # fmt: skip
    x = rounded(x * sigmoid(x), wide_ptr.dtype.element_ty)
    entry = tl.load(paths_ptr + row * BLOCK + length - 1)
    step_ptr = steps_ptr + (tl.load(rows_ptr + row * 5).to(tl.int64) * RING + entry % RING) * WORDS
    if is_value:
        share, log_decay = step_factors(
            narrow_ptr, rates_ptr, step_bias_ptr, row, head, NUM_HEADS, LEAST, MOST, FORM
        )  # fmt: skip
        place = (row * NUM_HEADS + head) * VALUE_DIM + columns
        tl.store(step_ptr + DECAYS + head, log_decay)
        if FORM == DELTA_NET:
            tl.store(shares_ptr + row * NUM_HEADS + head, share)
            tl.store(values_ptr + place, x, mask=is_real)
        else:
            tl.store(own_ptr + place, x, mask=is_real)
            tl.store(values_ptr + place, x * share, mask=is_real)
        return
    if FORM == DELTA_NET:
        x = x * tl.rsqrt(tl.sum(x * x, 0) + LENGTH_EPSILON)
    if is_query:
        if FORM == DELTA_NET:
            x = x * (KEY_DIM**-0.5)
        tl.store(queries_ptr + (row * NUM_KEY_HEADS + key_head) * KEY_DIM + columns, x, mask=is_real)
    else:
        tl.store(step_ptr + key_head * KEY_DIM + columns, x, mask=is_real)


@triton.jit
def gate_convolution(
    rows_ptr, paths_ptr, wide_ptr, taps_ptr, tap_bias_ptr, inputs_ptr, mixed_ptr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, TAPS: tl.constexpr, HAS_TAP_BIAS: tl.constexpr,
    FORM: tl.constexpr, RING: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, columns) of a layer that is a convolution alone: what it gives, behind its gates."""
    row = tl.program_id(0)
    if tl.load(rows_ptr + row * 5 + 2) == 0:
        return
    channels = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_real = channels < CHANNELS
    x = convolved(
        rows_ptr, paths_ptr, wide_ptr, taps_ptr, tap_bias_ptr, inputs_ptr, row, channels, is_real,
        CHANNELS, COLUMNS, TAPS, HAS_TAP_BIAS, FORM, RING, STEP, BLOCK,
    )  # fmt: skip
    gate = tl.load(wide_ptr + row * COLUMNS + CHANNELS + channels, mask=is_real, other=0.0).to(tl.float32)
    tl.store(mixed_ptr + row * CHANNELS + channels, rounded(x * gate, mixed_ptr.dtype.element_ty), mask=is_real)


def convolution_constants(sizes: MixerSizes, layout: StepLayout, has_tap_bias: bool) -> dict[str, Any]:
    """Return the constants of the convolution."""
    columns = sizes.columns()
    return {
        "CHANNELS": sizes.num_channels,
        "COLUMNS": sum(columns[role] for role in wide_roles(sizes)),
        "TAPS": sizes.conv_width,
        "HAS_TAP_BIAS": has_tap_bias,
        "FORM": int(sizes.form),
        "RING": layout.ring,
        "STEP": layout.words * 4 // layout.item_size,
        "BLOCK": BLOCK,
    }


def wide_roles(sizes: MixerSizes) -> tuple[str, ...]:
    """The products of a row that its first launch makes, one behind the other; those of heads are made in another."""
    return ("inputs", "gates", "betas") if sizes.form == MixerForm.CONVOLUTION else ("inputs", "gates")


def ready_constants(sizes: MixerSizes, layout: StepLayout, has_tap_bias: bool) -> dict[str, Any]:
    """Return the constants of `ready_head`, with its warps."""
    return convolution_constants(sizes, layout, has_tap_bias) | {
        "NUM_HEADS": sizes.num_heads,
        "NUM_KEY_HEADS": sizes.num_key_heads,
        "KEY_DIM": sizes.key_dim,
        "VALUE_DIM": sizes.value_dim,
        "WORDS": layout.words,
        "DECAYS": layout.decays,
        "LEAST": sizes.least_step,
        "MOST": sizes.most_step,
        "WIDTH": triton.next_power_of_2(max(sizes.key_dim, sizes.value_dim)),
        "num_warps": 1,
    }


def gate_constants(sizes: MixerSizes, layout: StepLayout, has_tap_bias: bool) -> dict[str, Any]:
    """Return the constants of `gate_convolution`."""
    return convolution_constants(sizes, layout, has_tap_bias) | {"WIDTH": GATED_COLUMNS}


def ready_heads(
    table: StateTable[Tensor],
    products: tuple[Tensor, Tensor],  # wide [num_rows, ...] and narrow
    floats: dict[str, Tensor],
    steps: tuple[Tensor, Tensor],  # inputs and words of one layer, [num_slots, ring, ...]
    found: tuple[Tensor, Tensor, Tensor, Tensor],  # queries, values, own values, shares: float32
    constants: dict[str, Any],
) -> None:
    """Launch the part of a layer with heads in front of its state."""
    wide, narrow = products
    num_heads = constants["NUM_HEADS"] + 2 * constants["NUM_KEY_HEADS"]
    ready_head[(len(table.rows), num_heads)](
        table.rows, table.paths, wide, narrow, floats["taps"], floats.get("tap_bias"), floats["rates"],
        floats["step_bias"], *steps, *found, **constants,
    )  # fmt: skip


def gate_convolutions(
    table: StateTable[Tensor],
    wide: Tensor,
    floats: dict[str, Tensor],
    inputs: Tensor,
    mixed: Tensor,  # [num_rows, num_channels]
    constants: dict[str, Any],
) -> None:
    """Launch a layer that is a convolution alone, between its products."""
    gate_convolution[(len(table.rows), triton.cdiv(mixed.shape[1], GATED_COLUMNS))](
        table.rows, table.paths, wide, floats["taps"], floats.get("tap_bias"), inputs, mixed, **constants
    )
