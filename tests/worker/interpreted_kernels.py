from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compute(first_ptr, second_ptr, mask_ptr, size: tl.constexpr, steps: tl.constexpr, keep: tl.constexpr):
    """Pass the result of each of the `steps` to `keep`."""
    n = tl.arange(0, size)
    first, second, mask = tl.load(first_ptr + n), tl.load(second_ptr + n), tl.load(mask_ptr + n) != 0
    for step in steps:
        keep(step, tl, first, second, mask)


@triton.jit
def copy(source_ptr, target_ptr, mask_ptr, other: tl.constexpr, size: tl.constexpr):
    """Copy by masks, and one number after them."""
    n = tl.arange(0, size) * 5 % size
    mask = tl.load(mask_ptr + n) != 0
    tl.store(target_ptr + n, tl.load(source_ptr + n, mask=mask, other=other), mask=mask | (n % 3 == 0))
    tl.store(target_ptr + size, tl.load(source_ptr + 1))
