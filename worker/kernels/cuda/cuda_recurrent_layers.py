"""Linear-attention, SSM and convolution layers on a GPU: inputs of rows, and launches."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_recurrence import StateBuffers, StateLayout, StateTable, walk, weigh_paths
from swiftbatch.worker.kernels.cuda.gemm import LinearKernel
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedRecurrentLayer, wide_columns
from swiftbatch.worker.kernels.cuda.triton_primitives import rounded
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.layer_specs import RecurrentForm, RecurrentSizes, StepLayout

DELTA_NET, CONVOLUTION = tl.constexpr(int(RecurrentForm.DELTA_NET)), tl.constexpr(int(RecurrentForm.CONVOLUTION))
LENGTH_EPSILON = tl.constexpr(1e-6)  # added to the squared lengths by which delta nets divide queries and keys
GATED_COLUMNS = 1024


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + e^x), with the rounding error of 1 + e^x added back."""
    power = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + power
    return tl.where(x > 20.0, x, tl.log(more) + (power - (more - 1.0)) / more)


@triton.jit
def input_of(wide_ptr, row, channels, is_real, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, FORM: tl.constexpr):
    """Return a row's convolution input, rounded as it is stored. In short convolutions it is gated."""
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
    """Return a row's convolved channels, summed from the oldest input on and rounded. Store the row's own input."""
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
    """Return the factor of a row's update, and the logarithm of the state's decay."""
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
    """Program (row, head of queries, keys or values): fills buffers and steps."""
    row, part = tl.program_id(0), tl.program_id(1)
    length = tl.load(rows_ptr + row * 5 + 2)
    if length == 0:
        return
    # Channels of a delta net are queries, keys, values; those of Mamba-2 are values, keys, queries.
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
    """Program (row, columns) of a pure convolution: its gated result."""
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


def convolution_constants(sizes: RecurrentSizes, layout: StepLayout, has_tap_bias: bool) -> dict[str, Any]:
    """Return the constants of the convolution."""
    return {
        "CHANNELS": sizes.num_channels,
        "COLUMNS": wide_columns(sizes),
        "TAPS": sizes.conv_width,
        "HAS_TAP_BIAS": has_tap_bias,
        "FORM": int(sizes.form),
        "RING": layout.ring,
        "STEP": layout.words * 4 // layout.item_size,
        "BLOCK": BLOCK,
    }


def ready_constants(sizes: RecurrentSizes, layout: StepLayout, has_tap_bias: bool) -> dict[str, Any]:
    """Return constants and warps of `ready_head`."""
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


def gate_constants(sizes: RecurrentSizes, layout: StepLayout, has_tap_bias: bool) -> dict[str, Any]:
    return convolution_constants(sizes, layout, has_tap_bias) | {"WIDTH": GATED_COLUMNS}


# Layers with a state or a convolution in CUDA kernels: four launches between products, or a single one.


NAME = "states 1"  # part of the numerics of models with mixers


@triton.jit
def finish_group(
    rows_ptr, wide_ptr, found_ptr, own_ptr, skip_ptr, norm_ptr, mixed_ptr, epsilon,
    NUMBERS: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, GATES: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_NORM: tl.constexpr, FORM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, group of numbers with a common norm)."""
    row = tl.program_id(0)
    if tl.load(rows_ptr + row * 5 + 2) == 0:
        return
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    n = tl.arange(0, WIDTH)
    is_real = n < GROUP
    columns = tl.program_id(1) * GROUP + n
    found = tl.load(found_ptr + row * NUMBERS + columns, mask=is_real, other=0.0)
    gate = tl.load(wide_ptr + row * COLUMNS + GATES + columns, mask=is_real, other=0.0).to(tl.float32)
    gate = gate * sigmoid(gate)
    if FORM == DELTA_NET:  # applies the norm, then the gate
        found = rounded(found, dtype)
        found = rounded(found * tl.rsqrt(tl.sum(found * found, 0) / GROUP + epsilon), dtype)
        found = rounded(found * tl.load(norm_ptr + columns, mask=is_real, other=0.0), dtype) * gate
    else:  # adds a share of the row's own values, applies the gate, then the norm
        own = tl.load(own_ptr + row * NUMBERS + columns, mask=is_real, other=0.0)
        found += own * tl.load(skip_ptr + columns // VALUE_DIM, mask=is_real, other=0.0)
        if HAS_NORM:
            found = found * gate
            found = found * tl.rsqrt(tl.sum(found * found, 0) / GROUP + epsilon)
            found = found * tl.load(norm_ptr + columns, mask=is_real, other=0.0)
        else:
            found = found * rounded(gate, dtype)
    tl.store(mixed_ptr + row * NUMBERS + columns, rounded(found, dtype), mask=is_real)


def finish_constants(sizes: RecurrentSizes) -> dict[str, Any]:
    """Return the constants of `finish_group`."""
    group = sizes.norm_width or sizes.value_dim
    return {
        "NUMBERS": sizes.width,
        "VALUE_DIM": sizes.value_dim,
        "GROUP": group,
        "GATES": sizes.columns()["inputs"],
        "COLUMNS": wide_columns(sizes),
        "HAS_NORM": sizes.norm_width > 0,
        "FORM": int(sizes.form),
        "WIDTH": triton.next_power_of_2(group),
        "num_warps": 1 if sizes.form == RecurrentForm.DELTA_NET else 4,
    }


class CudaRecurrentLayers:
    """All mixers of a decoder, which share buffers and so run one at a time."""

    def __init__(
        self, sizes: RecurrentSizes, states: StateBuffers, dtype: torch.dtype, linear: LinearKernel, num_rows: int
    ) -> None:
        self.layout = StateLayout(states.num_slots, states.layout.ring, sizes.conv_width - 1, num_rows)
        self._sizes, self._states, self._linear = sizes, states, linear
        device = states.steps.device
        heads = sizes.num_heads

        def rows(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=kind, device=device)

        self._wide = rows(wide_columns(sizes), kind=dtype)
        self._narrow = rows((1 + (sizes.form == RecurrentForm.DELTA_NET)) * heads, kind=dtype)
        self._mixed = rows(sizes.width, kind=dtype)
        self._queries = rows(sizes.num_key_heads, sizes.key_dim)
        self._values, self._own, self._found = (rows(heads, sizes.value_dim) for _ in range(3))
        self._shares, self._wholes = rows(heads), rows(heads)
        self._scores = rows(heads, BLOCK), rows(heads, BLOCK)

    def narrowed(self, num_rows: int) -> CudaRecurrentLayers:
        """Return the mixers of forwards of fewer rows, in the first rows of the same buffers."""
        other = copy.copy(self)
        other.layout = replace(self.layout, num_rows=num_rows)
        for name in ("_wide", "_narrow", "_mixed", "_queries", "_values", "_own", "_found", "_shares", "_wholes"):
            setattr(other, name, getattr(self, name)[:num_rows])
        other._scores = self._scores[0][:num_rows], self._scores[1][:num_rows]
        return other

    def run(
        self, table: StateTable[Tensor], number: int, mixer: StackedRecurrentLayer, rows: Tensor, out: Tensor
    ) -> None:
        """Run the `number`-th mixer from `rows [num_rows, hidden]` to `out` of that shape."""
        if self._sizes.in_scale != 1.0:
            rows = torch.mul(rows, self._sizes.in_scale, out=out)  # `out` is overwritten last
        self._linear(rows, mixer.wide.weight, mixer.wide.bias, self._wide)
        if mixer.narrow is None:
            self._gate(table, number, mixer)
        else:
            self._linear(rows, mixer.narrow.weight, mixer.narrow.bias, self._narrow)
            if mixer.scales is not None:
                for numbers, scales in zip((self._wide, self._narrow), mixer.scales, strict=True):
                    numbers.mul_(scales)
            self._run_heads(table, number, mixer)
        self._linear(self._mixed, mixer.output.weight, mixer.output.bias, out)
        if self._sizes.out_scale != 1.0:
            out.mul_(self._sizes.out_scale)

    def _gate(self, table: StateTable[Tensor], number: int, mixer: StackedRecurrentLayer) -> None:
        floats, inputs = mixer.floats, self._states.inputs[number]
        grid = (len(table.rows), triton.cdiv(self._mixed.shape[1], GATED_COLUMNS))
        gate_convolution[grid](
            table.rows, table.paths, self._wide, floats["taps"], floats.get("tap_bias"), inputs, self._mixed,
            **gate_constants(self._sizes, self._states.layout, "tap_bias" in floats),
        )  # fmt: skip

    def _run_heads(self, table: StateTable[Tensor], number: int, mixer: StackedRecurrentLayer) -> None:
        sizes, layout, floats = self._sizes, self._states.layout, mixer.floats
        states, steps, inputs = (
            each[number] for each in (self._states.states, self._states.steps, self._states.inputs)
        )
        ready_head[(len(table.rows), sizes.num_heads + 2 * sizes.num_key_heads)](
            table.rows, table.paths, self._wide, self._narrow, floats["taps"], floats.get("tap_bias"), floats["rates"],
            floats["step_bias"], inputs, steps, self._queries, self._values, self._own, self._shares,
            **ready_constants(sizes, layout, "tap_bias" in floats),
        )  # fmt: skip
        weights = *self._scores, self._wholes
        weigh_paths(table, steps, self._queries, weights, sizes, layout)
        walk(table, states, steps, (self._queries, self._values, self._shares), weights, self._found, sizes, layout)
        constants = finish_constants(sizes)
        finish_group[(len(table.rows), sizes.width // constants["GROUP"])](
            table.rows, self._wide, self._found, self._own, floats.get("skip"), floats.get("norm"), self._mixed,
            sizes.epsilon, **constants,
        )  # fmt: skip
