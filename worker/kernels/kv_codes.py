"""Codes of keys and values: 8 bits in caches, and two bits of scanned keys."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.kernels.kernel_sizes import CUDA_SCALE_BYTES, KV_SCALE_BYTES

# Keys and values in 8 bits, as in kv_codes.h. A row has a code per dimension, then a float32 scale: the row's largest
# magnitude divided by the largest number that a code can represent. A decoded number is code times scale, rounded once.


# uint8, because numpy and copies lack e4m3
CODES: dict[KVDtype, torch.dtype] = {"int8": torch.int8, "fp8": torch.uint8}
LARGEST = {torch.int8: 127.0, torch.uint8: 448.0}
KV_CODES = {torch.int8: 1, torch.uint8: 2}  # `kv_code` of source/api.h; 0 means no codes


def cuda_row_width(kept: torch.dtype, numbers: torch.dtype, head_dim: int) -> int | None:
    """Return the width of a GPU's row for `head_dim` numbers, or None for an unsupported dtype."""
    if kept == numbers:
        return head_dim
    is_aligned = head_dim % CUDA_SCALE_BYTES == 0
    return head_dim + CUDA_SCALE_BYTES if kept in KV_CODES and is_aligned else None


def coded(rows: Tensor, codes: torch.dtype, scale_bytes: int = KV_SCALE_BYTES) -> Tensor:
    """Encode rows `[..., head_dim]` as `[..., head_dim + scale_bytes]`: codes, scales, zeros."""
    numbers = rows.float()
    scales = numbers.abs().amax(dim=-1, keepdim=True) / LARGEST[codes]
    is_usable = (scales > 0) & scales.isfinite()
    parts = torch.where(is_usable, numbers / scales, 0.0).clamp(-LARGEST[codes], LARGEST[codes])
    found = parts.round().to(torch.int8) if codes == torch.int8 else parts.to(torch.float8_e4m3fn)
    room = torch.zeros(*scales.shape[:-1], scale_bytes - KV_SCALE_BYTES, dtype=codes, device=rows.device)
    return torch.cat([found.view(codes), scales.view(codes), room], dim=-1)


def numbers_of(rows: Tensor, dtype: torch.dtype, head_dim: int) -> Tensor:
    """Decode rows to numbers `[..., head_dim]`; return rows of numbers unchanged."""
    if rows.dtype not in KV_CODES:
        return rows
    codes = rows[..., :head_dim]
    scales = rows[..., head_dim : head_dim + KV_SCALE_BYTES].contiguous().view(torch.float32)
    numbers = codes.float() if rows.dtype == torch.int8 else codes.contiguous().view(torch.float8_e4m3fn).float()
    return (numbers * scales).to(dtype)


# Chunks of scanned keys, whose codes and moments C computes.


SCAN_CHUNK = 1024  # source/api.h has the same value, also of the next constant
CLUSTER_CHUNKS = 16  # number of chunks that share their moments
WORTH_READING = 0.1  # reading the best keys pays only if they have this share of a query's attention weight


def most_chunks(num_keys: int) -> int:
    return max(1, num_keys // SCAN_CHUNK)


def flat_deviation(num_best: int, num_keys: int) -> float:
    """Return the deviation of normal scores below which the `num_best` best of `num_keys` keys weigh too little.

    If scores have deviation t, the keys above a score z have the share Phi(t - z) of all weight.
    """
    normal, share = NormalDist(), min(num_best / num_keys, 0.5)
    return max(0.0, normal.inv_cdf(1 - share) + normal.inv_cdf(WORTH_READING))
