"""LoRA adapters in a forward on a GPU: each row adds the products of its own adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.triton_primitives import narrowed
from swiftbatch.worker.kernels.decoder_weights import AdapterWeights
from swiftbatch.worker.kernels.kernel_sizes import LANES

STACKED = {  # roles of each stacked product, in the order of its columns
    "query_key_value": ("query", "key", "value", "head_gate"),
    "output": ("output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
TILE_NUMBERS = 4096  # of a program's tile of weights
LayerAdapter = Mapping[str, tuple[Tensor, Tensor]]
"""`down [rank, depth]` and `up [columns, rank]` of one adapter in one layer, by role."""


@dataclass(frozen=True)
class StackedAdapters:
    """Weights of all adapters for the columns of one product, without roles that no adapter has."""

    down: Tensor  # [num_adapters, num_roles, rank, depth] float32
    up: Tensor  # [num_adapters, num_columns, rank] float32
    roles: Tensor  # [num_columns] int32: the place of each column's role in `down`
    places: Tensor  # [num_columns] int32: each column's place in the product

    @property
    def lowered_width(self) -> int:
        return self.down.shape[1] * self.down.shape[2]


def adapter_bytes(adapters: Sequence[AdapterWeights]) -> int:
    """Return what `stacked_adapters` takes for all layers."""
    layers = zip(*(each.layers for each in adapters), strict=True)
    found = (_stacked(own, roles) for own in layers for roles in STACKED.values())
    return sum(4 * (down.numel() + up.numel()) for down, up in (pair for pair in found if pair is not None))


def stacked_adapters(
    own: Sequence[LayerAdapter], starts: Mapping[str, int], device: torch.device
) -> dict[str, StackedAdapters]:
    """Stack a layer's adapters for its products. `starts` has the first column of each role."""
    stacked: dict[str, StackedAdapters] = {}
    for product, roles in STACKED.items():
        if (pair := _stacked(own, roles)) is None:
            continue
        widths = _widths(own, roles)
        number = torch.cat([torch.full((width,), place) for place, width in enumerate(widths.values())])
        places = torch.cat([torch.arange(width) + starts[role] for role, width in widths.items()])
        tensors = (*pair, number.int(), places.int())
        stacked[product] = StackedAdapters(*(each.to(device) for each in tensors))
    return stacked


def _widths(own: Iterable[LayerAdapter], roles: Sequence[str]) -> dict[str, int]:
    """Return the number of columns of each role that an adapter adapts."""
    found = {role: len(each[role][1]) for each in own for role in roles if role in each}
    return {role: found[role] for role in roles if role in found}


def _stacked(own: Sequence[LayerAdapter], roles: Sequence[str]) -> tuple[Tensor, Tensor] | None:
    """Return `down` and `up` of some roles, with zeros where an adapter has none, or None if no adapter has any."""
    widths = _widths(own, roles)
    pairs = [each[role] for each in own for role in widths if role in each]
    if not pairs:
        return None
    rank, depth = triton.next_power_of_2(max(len(down) for down, _ in pairs)), pairs[0][0].shape[1]
    all_down = torch.zeros(len(own), len(widths), rank, depth)
    all_up = torch.zeros(len(own), sum(widths.values()), rank)
    for adapter, each in enumerate(own):
        start = 0
        for number, (role, width) in enumerate(widths.items()):
            if role in each:
                down, up = each[role]
                all_down[adapter, number, : len(down)] = down
                all_up[adapter, start : start + width, : len(down)] = up
            start += width
    return all_down, all_up


@triton.jit
def lower_row(
    adapters_ptr, given_ptr, lora_down_ptr, lowered_ptr,
    DEPTH: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, NUM_ROLES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, role): multiplies the row with its adapter's `down`, if it has one."""
    row, role = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(adapters_ptr + row)
    if adapter == 0:
        return
    lora_down_ptr += ((adapter - 1).to(tl.int64) * NUM_ROLES + role) * RANK * DEPTH
    ranks = tl.arange(0, RANK)
    sums = tl.zeros([RANK, TILE], dtype=tl.float32)
    for first in range(0, DEPTH, TILE):
        places = first + tl.arange(0, TILE)
        given = tl.load(given_ptr + row * DEPTH + places, mask=places < DEPTH, other=0.0).to(tl.float32)
        down = tl.load(
            lora_down_ptr + ranks[:, None] * DEPTH + places[None, :], mask=places[None, :] < DEPTH, other=0.0
        )
        sums += down * given[None, :]
    tl.store(lowered_ptr + row * WIDTH + role * RANK + ranks, tl.sum(sums, 1))


@triton.jit
def add_row(
    adapters_ptr, lowered_ptr, lora_up_ptr, roles_ptr, own_columns_ptr, out_ptr,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, tile of columns): adds the lowered row times `up` to the product, rounding once."""
    row = tl.program_id(0)
    adapter = tl.load(adapters_ptr + row)
    if adapter == 0:
        return
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_real = columns < COLUMNS
    ranks = tl.arange(0, RANK)
    roles = tl.load(roles_ptr + columns, mask=is_real, other=0)
    lowered = tl.load(lowered_ptr + row * WIDTH + roles[:, None] * RANK + ranks[None, :])
    lora_up_ptr += (adapter - 1).to(tl.int64) * COLUMNS * RANK
    up = tl.load(lora_up_ptr + columns[:, None] * RANK + ranks[None, :], mask=is_real[:, None], other=0.0)
    out_ptr += row * OUT_WIDTH + tl.load(own_columns_ptr + columns, mask=is_real, other=0)
    product = tl.load(out_ptr, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out_ptr, narrowed(product + tl.sum(lowered * up, 1), out_ptr.dtype.element_ty), mask=is_real)


def tile_of(rank: int) -> int:
    """Return how many numbers of a row, or columns of a product, a program takes at a time."""
    return max(LANES, TILE_NUMBERS // rank)


def add_adapted(adapters: Tensor, rows: Tensor, weights: StackedAdapters, lowered: Tensor, out: Tensor) -> None:
    """Add what the rows' `adapters [num_rows] int32` (0: none) add to a product `out [num_rows, width]`.

    `rows [num_rows, depth]` are what the product read, and `lowered [num_rows, -] float32` is room.
    """
    _, num_roles, rank, depth = weights.down.shape
    num_columns, tile = weights.up.shape[1], tile_of(rank)
    lower_row[(len(rows), num_roles)](
        adapters, rows, weights.down, lowered, DEPTH=depth, RANK=rank, TILE=tile, NUM_ROLES=num_roles,
        WIDTH=lowered.shape[1],
    )  # fmt: skip
    add_row[(len(rows), triton.cdiv(num_columns, tile))](
        adapters, lowered, weights.up, weights.roles, weights.places, out, COLUMNS=num_columns, RANK=rank, TILE=tile,
        WIDTH=lowered.shape[1], OUT_WIDTH=out.shape[1],
    )  # fmt: skip
