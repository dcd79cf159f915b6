"""Layers with a state or a convolution as CUDA kernels: four launches between the products of one, or one alone.

In front of the state two products, then keys, values and factors (`ready`), the weights of paths and the walk
(`state_walk`), norms and gates of what rows have found, behind it a product: seven launches, three of a convolution
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import BLOCK
from swiftbatch.worker.kernels.cuda.packed_linear import WeightKernel
from swiftbatch.worker.kernels.cuda.rounding import rounded
from swiftbatch.worker.kernels.cuda.states.state_buffers import StateBuffers
from swiftbatch.worker.kernels.cuda.states.state_inputs import (
    DELTA_NET,
    gate_constants,
    gate_convolutions,
    ready_constants,
    ready_heads,
    sigmoid,
    wide_roles,
)
from swiftbatch.worker.kernels.cuda.states.state_table import StateLayout, StateTable
from swiftbatch.worker.kernels.cuda.states.state_walk import walk, weigh_paths
from swiftbatch.worker.kernels.decoder_weights import AnyLinear
from swiftbatch.worker.kernels.mixer_sizes import MixerForm, MixerSizes, MixerWeights, mixer_float_shapes

Stack = Callable[[Sequence[AnyLinear], torch.device], AnyLinear]


@dataclass(frozen=True)
class StackedMixer:
    """The products in front by what their rows share a form in: those of channels, and those of heads; that behind."""

    sizes: MixerSizes
    wide: AnyLinear  # inputs, gates, in a convolution alone the gates of inputs behind them
    narrow: AnyLinear | None  # a number or two of each head
    output: AnyLinear
    floats: dict[str, Tensor]  # on the device; `rates` are what decays are powers of
    scales: tuple[Tensor, Tensor] | None = None  # of the columns of both products in front, of the model's dtype

    @property
    def products(self) -> list[AnyLinear]:
        """All of them."""
        return [self.wide, self.output, *([] if self.narrow is None else [self.narrow])]


def stacked_mixer(mixer: MixerWeights, device: torch.device, stack: Stack) -> StackedMixer:
    """Copy a mixer's weights to a device, stacked. Raises ValueError for numbers of another shape than sizes say."""
    sizes, linears = mixer.sizes, mixer.linears
    for role, numbers, shape in mixer_float_shapes(mixer):
        if numbers is not None and tuple(numbers.shape) != shape:
            raise ValueError(f"found {role} as {list(numbers.shape)}, expected {list(shape)}")
    floats = {role: numbers.detach().float().to(device).contiguous() for role, numbers in mixer.floats.items()}
    scales = floats.pop("scales", None)
    if "rates" in floats:
        floats["rates"] = floats["rates"].exp()
    heads = ("betas", "steps") if sizes.form == MixerForm.DELTA_NET else ("steps",)
    return StackedMixer(
        sizes,
        stack([linears[role] for role in wide_roles(sizes)], device),
        None if sizes.form == MixerForm.CONVOLUTION else stack([linears[role] for role in heads], device),
        stack([linears["output"]], device),
        floats,
        None if scales is None else _split(scales.to(linears["output"].weight.dtype), sizes),
    )


def _split(scales: Tensor, sizes: MixerSizes) -> tuple[Tensor, Tensor]:
    wide = sum(sizes.columns()[role] for role in wide_roles(sizes))
    return scales[:wide], scales[wide:]


NAME = "states 1"  # in the numerics of models that have some


@triton.jit
def finish_group(
    rows_ptr, wide_ptr, found_ptr, own_ptr, skip_ptr, norm_ptr, mixed_ptr, epsilon,
    NUMBERS: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, GATES: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_NORM: tl.constexpr, FORM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, group of numbers that are normed together)."""
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
    if FORM == DELTA_NET:  # normed, then gated
        found = rounded(found, dtype)
        found = rounded(found * tl.rsqrt(tl.sum(found * found, 0) / GROUP + epsilon), dtype)
        found = rounded(found * tl.load(norm_ptr + columns, mask=is_real, other=0.0), dtype) * gate
    else:  # what the state does not say is a share of the row's own values; gated, then normed
        own = tl.load(own_ptr + row * NUMBERS + columns, mask=is_real, other=0.0)
        found += own * tl.load(skip_ptr + columns // VALUE_DIM, mask=is_real, other=0.0)
        if HAS_NORM:
            found = found * gate
            found = found * tl.rsqrt(tl.sum(found * found, 0) / GROUP + epsilon)
            found = found * tl.load(norm_ptr + columns, mask=is_real, other=0.0)
        else:
            found = found * rounded(gate, dtype)
    tl.store(mixed_ptr + row * NUMBERS + columns, rounded(found, dtype), mask=is_real)


def finish_constants(sizes: MixerSizes) -> dict[str, Any]:
    """Return the constants of `finish_group`."""
    columns = sizes.columns()
    group = sizes.norm_width or sizes.value_dim
    return {
        "NUMBERS": sizes.width,
        "VALUE_DIM": sizes.value_dim,
        "GROUP": group,
        "GATES": columns["inputs"],
        "COLUMNS": sum(columns[role] for role in wide_roles(sizes)),
        "HAS_NORM": sizes.norm_width > 0,
        "FORM": int(sizes.form),
        "WIDTH": triton.next_power_of_2(group),
        "num_warps": 1 if sizes.form == MixerForm.DELTA_NET else 4,
    }


def finish(
    table: StateTable[Tensor],
    wide: Tensor,  # of the products in front, with gates behind inputs
    found: Tensor,  # [num_rows, num_heads, value_dim] float32
    own: Tensor,  # as found
    floats: dict[str, Tensor],
    mixed: Tensor,  # [num_rows, num_heads * value_dim] of the model's dtype
    sizes: MixerSizes,
) -> None:
    """Write what the last product reads."""
    constants = finish_constants(sizes)
    finish_group[(len(table.rows), sizes.width // constants["GROUP"])](
        table.rows, wide, found, own, floats.get("skip"), floats.get("norm"), mixed, sizes.epsilon, **constants
    )


def scale(rows: Tensor, factor: float) -> None:
    """Multiply all numbers of some rows, in place; rounded once."""
    if factor != 1.0:
        rows.mul_(factor)


class CudaMixers:
    """All mixers of a decoder, which share their buffers: one runs at a time."""

    def __init__(
        self, sizes: MixerSizes, states: StateBuffers, dtype: torch.dtype, linear: WeightKernel, num_rows: int
    ) -> None:
        """All mixers have these sizes. What rows find in `states` follows from the tables that `layout` fills."""
        self.layout = StateLayout(states.num_slots, states.layout.ring, sizes.conv_width - 1, num_rows)
        self._sizes, self._states, self._linear = sizes, states, linear
        device = states.steps.device
        columns, heads = sizes.columns(), sizes.num_heads

        def rows(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=kind, device=device)

        self._wide = rows(sum(columns[role] for role in wide_roles(sizes)), kind=dtype)
        self._narrow = rows((1 + (sizes.form == MixerForm.DELTA_NET)) * heads, kind=dtype)
        self._mixed = rows(sizes.width, kind=dtype)
        self._queries = rows(sizes.num_key_heads, sizes.key_dim)
        self._values, self._own, self._found = (rows(heads, sizes.value_dim) for _ in range(3))
        self._shares, self._wholes = rows(heads), rows(heads)
        self._scores = rows(heads, BLOCK), rows(heads, BLOCK)

    def run(self, table: StateTable[Tensor], number: int, mixer: StackedMixer, rows: Tensor, out: Tensor) -> None:
        """Run one layer's mixer, the `number`-th of them, from `rows [num_rows, hidden]` to `out` of that shape."""
        if self._sizes.in_scale != 1.0:
            rows = torch.mul(rows, self._sizes.in_scale, out=out)  # which is written last
        self._linear(rows, mixer.wide.weight, mixer.wide.bias, self._wide)
        if mixer.narrow is None:
            constants = gate_constants(self._sizes, self._states.layout, "tap_bias" in mixer.floats)
            gate_convolutions(table, self._wide, mixer.floats, self._states.inputs[number], self._mixed, constants)
        else:
            self._linear(rows, mixer.narrow.weight, mixer.narrow.bias, self._narrow)
            if mixer.scales is not None:
                for numbers, scales in zip((self._wide, self._narrow), mixer.scales, strict=True):
                    numbers.mul_(scales)
            self._run_heads(table, number, mixer)
        self._linear(self._mixed, mixer.output.weight, mixer.output.bias, out)
        scale(out, self._sizes.out_scale)

    def _run_heads(self, table: StateTable[Tensor], number: int, mixer: StackedMixer) -> None:
        sizes, layout = self._sizes, self._states.layout
        states, steps, inputs = (
            each[number] for each in (self._states.states, self._states.steps, self._states.inputs)
        )
        constants = ready_constants(sizes, layout, "tap_bias" in mixer.floats)
        found = self._queries, self._values, self._own, self._shares
        ready_heads(table, (self._wide, self._narrow), mixer.floats, (inputs, steps), found, constants)
        weights = *self._scores, self._wholes
        weigh_paths(table, steps, self._queries, weights, sizes, layout)
        walk(table, states, steps, (self._queries, self._values, self._shares), weights, self._found, sizes, layout)
        finish(table, self._wide, self._found, self._own, mixer.floats, self._mixed, sizes)
