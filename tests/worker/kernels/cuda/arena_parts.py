"""Small arenas of distinct numbers."""

from __future__ import annotations

import torch

from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable

NUM_LAYERS, NUM_SLOTS, NUM_HEADS, CAPACITY, HEAD_DIM = 2, 3, 2, 90, 48  # a width that is no power of two
PAGES = [7, 2, 12, 0, 9]


def any_arena(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return `[num_layers, 2, num_slots, num_kv_heads, capacity, head_dim]` of random bits, NaN included."""
    shape = (NUM_LAYERS, 2, NUM_SLOTS, NUM_HEADS, CAPACITY, HEAD_DIM)
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator)
    return bits.to(torch.int16).view(dtype) if dtype == torch.bfloat16 else bits.to(dtype)


def in_pages(rows: torch.Tensor) -> tuple[torch.Tensor, PageTable]:
    """Put `rows [..., capacity, head_dim]` into shuffled pages; return the pool and their numbers."""
    page = -(-rows.shape[-2] // len(PAGES))
    pool = rows.new_full((*rows.shape[:-2], 13 * page, rows.shape[-1]), torch.nan)
    for number, place in enumerate(PAGES):
        own = rows[..., number * page : (number + 1) * page, :]
        pool[..., place * page : place * page + own.shape[-2], :] = own
    return pool, PageTable(torch.tensor(PAGES, dtype=torch.int32), page)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int8), other.contiguous().view(torch.int8))
