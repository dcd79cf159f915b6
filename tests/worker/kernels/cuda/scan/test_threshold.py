from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from swiftbatch.worker.kernels.cuda.scanned_texts import in_order, largest_number

NUM_NUMBERS = 512


@triton.jit
def find(numbers_ptr, out_ptr, count, place, size: tl.constexpr):
    n = tl.arange(0, size)
    numbers = in_order(tl.load(numbers_ptr + n).to(tl.int32, bitcast=True))
    tl.store(out_ptr, in_order(largest_number(numbers, n < count, place)).to(tl.float32, bitcast=True))


@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e30, 0.0])
@pytest.mark.parametrize(("count", "place"), [(512, 1), (512, 7), (100, 100), (64, 33), (1, 1)])
def test_the_number_at_a_place_is_that_of_sorting(count: int, place: int, spread: float) -> None:
    """Numbers of both signs, some twice; uncounted ones are larger or smaller."""
    rng = np.random.default_rng(count + place)
    numbers = (spread * rng.standard_normal(NUM_NUMBERS)).astype(np.float32)
    numbers[1::3] = numbers[0]
    out = torch.zeros(1)
    find[(1,)](torch.from_numpy(numbers), out, count, place, size=NUM_NUMBERS)
    assert out.item() == np.sort(numbers[:count])[::-1][place - 1]
