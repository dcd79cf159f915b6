"""Activation of feed-forward layers, gates of heads, and soft cap of logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.norm_rope_kernels import is_padding
from swiftbatch.worker.kernels.cuda.tree_attention import LOG2_E
from swiftbatch.worker.kernels.cuda.triton_primitives import rounded
from swiftbatch.worker.kernels.layer_specs import Activation

ACTIVE_COLUMNS = 1024
GELU_TANH, RELU2 = tl.constexpr(int(Activation.GELU_TANH)), tl.constexpr(int(Activation.RELU2))
XIELU = tl.constexpr(int(Activation.XIELU))


@triton.jit
def exponential_less_one(x):
    """Return e^x - 1 for x up to 0, by a series near 0."""
    series = 1.0 + x * (1 / 7) * (1.0 + x * (1 / 8) * (1.0 + x * (1 / 9)))
    series = 1.0 + x * (1 / 4) * (1.0 + x * (1 / 5) * (1.0 + x * (1 / 6) * series))
    series = x * (1.0 + x * (1 / 2) * (1.0 + x * (1 / 3) * series))
    return tl.where(x > -0.5, series, tl.exp(x) - 1.0)


@triton.jit
def xielu(x, curve_ptr):
    bent = exponential_less_one(tl.minimum(x, tl.load(curve_ptr + 3))) - x
    share = tl.where(x > 0, tl.load(curve_ptr) * x * x, bent * tl.load(curve_ptr + 1))
    return share + tl.load(curve_ptr + 2) * x


@triton.jit
def activated(x, curve_ptr, ACTIVATION: tl.constexpr):
    """Return SILU or another activation of float32 numbers."""
    if ACTIVATION == XIELU:
        return xielu(x, curve_ptr)
    if ACTIVATION == RELU2:
        positive = tl.where(x < 0, 0.0, x)  # NaN stays
        return positive * positive
    if ACTIVATION == GELU_TANH:  # (1 + tanh(a)) / 2 = 1 / (1 + exp(-2 a))
        double = x * (1.5957691216057308 + 0.07135481627260025 * x * x)
        return x / (1 + tl.exp(tl.minimum(-double, 87.0)))  # float32 overflows beyond it, as in the C kernels
    return x / (1 + tl.exp(-x))


@triton.jit
def activate_row(
    rows_ptr, gate_up_ptr, curve_ptr, activated_ptr,
    INTERMEDIATE: tl.constexpr, COLUMNS: tl.constexpr, HAS_GATES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (row, columns): activates the gate times the up projection, or the up projection alone."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = columns < INTERMEDIATE
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    parts: tl.constexpr = 2 if HAS_GATES else 1
    active = tl.load(gate_up_ptr + row * parts * INTERMEDIATE + columns, mask=is_real, other=0.0).to(tl.float32)
    if HAS_GATES:
        up = tl.load(gate_up_ptr + (row * 2 + 1) * INTERMEDIATE + columns, mask=is_real, other=0.0).to(tl.float32)
        active = rounded(activated(active, curve_ptr, ACTIVATION), dtype) * up
    else:
        active = activated(active, curve_ptr, ACTIVATION)
    tl.store(activated_ptr + row * INTERMEDIATE + columns, rounded(active, dtype), mask=is_real)


@triton.jit
def gate_row(rows_ptr, qkv_ptr, mixed_ptr, ALL: tl.constexpr, NUMBERS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, columns): applies the gates in place."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = columns < NUMBERS
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    gate = tl.load(qkv_ptr + row * ALL + ALL - NUMBERS + columns, mask=is_real, other=0.0).to(tl.float32)
    mixed = tl.load(mixed_ptr + row * NUMBERS + columns, mask=is_real, other=0.0).to(tl.float32)
    mixed = rounded(mixed * rounded(1 / (1 + tl.exp(-gate)), dtype), dtype)
    tl.store(mixed_ptr + row * NUMBERS + columns, mixed, mask=is_real)


def gate_heads(rows: Tensor, qkv: Tensor, mixed: Tensor) -> None:
    """Multiply attention's results `mixed [num_rows, ...]` by the sigmoids of the last columns of `qkv`, its gates."""
    numbers = mixed[0].numel()
    grid = (len(mixed), triton.cdiv(numbers, ACTIVE_COLUMNS))
    gate_row[grid](rows, qkv, mixed, ALL=qkv.shape[1], NUMBERS=numbers, COLUMNS=ACTIVE_COLUMNS)


def activate(
    rows: Tensor,
    gate_up: Tensor,
    out: Tensor,
    activation: Activation = Activation.SILU,
    curve: Tensor | None = None,
) -> None:
    """Map `[num_rows, 2 * intermediate]` (gates first, or ups alone) to `out [num_rows, intermediate]`.

    `curve [4] float32`, on the device, has XIELU's parameters.
    """
    intermediate = out.shape[1]
    grid = (len(out), triton.cdiv(intermediate, ACTIVE_COLUMNS))
    activate_row[grid](
        rows, gate_up, curve, out, INTERMEDIATE=intermediate, COLUMNS=ACTIVE_COLUMNS,
        HAS_GATES=gate_up.shape[1] > intermediate, ACTIVATION=int(activation),
    )  # fmt: skip


SOFTCAP_COLUMNS = 1024


@triton.jit
def softcap_row(logits_ptr, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, CAP: tl.constexpr):
    """Program (row, columns): cap * tanh(logit / cap)."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    logits_ptr += tl.program_id(0).to(tl.int64) * VOCAB + columns
    logits = tl.load(logits_ptr, mask=columns < VOCAB, other=0.0)
    power = tl.exp2(tl.abs(logits) * (-2 * LOG2_E / CAP))
    softcapped = CAP * (1 - power) / (1 + power)
    tl.store(logits_ptr, tl.where(logits < 0, -softcapped, softcapped), mask=columns < VOCAB)


def softcap_logits(logits: Tensor, cap: float) -> None:
    num_rows, vocab = logits.shape
    grid = (num_rows, triton.cdiv(vocab, SOFTCAP_COLUMNS))
    softcap_row[grid](logits, VOCAB=vocab, COLUMNS=SOFTCAP_COLUMNS, CAP=cap)
