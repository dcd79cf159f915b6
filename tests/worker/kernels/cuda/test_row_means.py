from __future__ import annotations

import pytest
import torch

from swiftbatch.worker.kernels.cuda.kv_kernels import average_chunks
from tests.worker.kernels.cuda.arena_parts import HEAD_DIM, NUM_HEADS, NUM_LAYERS, in_pages

CAPACITY = 90


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("first", "chunk_size", "num_chunks"), [(16, 8, 9), (2, 32, 2), (7, 5, 3), (0, 1, 1)])
def test_means_are_rounded_once(first: int, chunk_size: int, num_chunks: int, dtype: torch.dtype) -> None:
    size = (NUM_LAYERS, 2, NUM_HEADS, CAPACITY, HEAD_DIM)
    source = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)[:, 1]
    buffer = torch.full((NUM_LAYERS, NUM_HEADS, 20, HEAD_DIM), torch.nan, dtype=dtype)
    source[:, :, :first] = torch.nan
    source[:, :, first + chunk_size * num_chunks :] = torch.nan
    average_chunks(source, first, chunk_size, buffer[:, :, 4 : 4 + num_chunks])
    rows = source[:, :, first : first + chunk_size * num_chunks].unflatten(2, (num_chunks, chunk_size))
    exact = rows.double().mean(dim=3)
    found = buffer[:, :, 4 : 4 + num_chunks].double()
    assert ((found - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6).all()
    pool, pages = in_pages(source)
    again = torch.empty_like(buffer[:, :, 4 : 4 + num_chunks])
    average_chunks(pool, first, chunk_size, again, pages)
    assert torch.equal(again, buffer[:, :, 4 : 4 + num_chunks])
    buffer[:, :, 4 : 4 + num_chunks] = torch.nan
    assert buffer.isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    source, out = torch.zeros(2, 2, CAPACITY, 8), torch.zeros(2, 2, 3, 8)
    for wrong in (out[:1], out.double(), out.transpose(2, 3)):
        with pytest.raises(ValueError, match="expected"):
            average_chunks(source, 0, 8, wrong)
    for first in (-1, CAPACITY - 23):
        with pytest.raises(ValueError, match="expected them within 0 to 90"):
            average_chunks(source, first, 8, out)
