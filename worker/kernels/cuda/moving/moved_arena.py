"""The arena that holds the keys and values of all slots, as kernels that move rows see it: numbers without meaning."""

from __future__ import annotations

import torch

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # of a number's size in bytes


def expect_arena(arena: torch.Tensor) -> None:
    """Raise ValueError for anything but `[num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]` side by side."""
    if arena.dim() != 6 or arena.shape[1] != 2 or not arena.is_contiguous() or arena.element_size() not in BITS:
        raise ValueError(
            f"arena: found {arena.dtype} {list(arena.shape)} with strides {list(arena.stride())}, expected "
            "[num_layers, 2, num_slots, num_kv_heads, capacity, head_dim] side by side, of 1, 2 or 4 bytes each"
        )


def bits_of(rows: torch.Tensor) -> torch.Tensor:
    """View the same memory as whole numbers: a copy then keeps every bit, those of NaN as well."""
    return rows.view(BITS[rows.element_size()])
