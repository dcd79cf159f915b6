"""A CPU stand-in for flash-attn 2.8.3's `flash_attn_with_kvcache`."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels import gpu_kernel_choice
from tests.worker.library_calls import LibraryCall, Returned

VERSION = "2.8.3"
MOST_SPLITS = 128


def install(patches: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = LibraryCall(flash_attn_with_kvcache)  # type: ignore[attr-defined]
    patches.setitem(sys.modules, "flash_attn", module)
    patches.setattr(gpu_kernel_choice, "flash_version", lambda: VERSION)
    patches.setattr("swiftbatch.worker.kernels.cuda.attention_backends.flash_version", lambda: VERSION)


def flash_attn_with_kvcache(
    q: Tensor,  # [batch, num_rows, num_heads, head_dim]
    k_cache: Tensor,  # [num_pages, page, num_kv_heads, head_dim]
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,  # [batch, most_pages]
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Returned:  # the published parameters, in their order
    """Return output `[batch, num_rows, num_heads, head_dim]` and natural LSE `[batch, num_heads, num_rows]`, inf if
    empty.
    """
    _check_numbers(q, k_cache, v_cache)
    others = k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes
    assert others == (None,) * len(others), "what they would change is not computed here"
    assert (window_size, softcap, rotary_interleaved) == ((-1, -1), 0.0, True)
    assert cache_seqlens is not None, "without them another kernel runs"
    assert block_table is not None
    assert 1 <= num_splits <= MOST_SPLITS, "0 is a choice by the batch; more are not taken"
    assert return_softmax_lse
    assert not causal, "rows are heads, too"
    for indices, shape in ((cache_seqlens, (len(q),)), (block_table, (len(q), block_table.shape[1]))):
        assert indices.dtype == torch.int32
        assert indices.is_contiguous()
        assert indices.shape == shape
    page = k_cache.shape[1]
    assert page % 256 == 0, "Paged KV cache block size must be divisible by 256"
    capacity = block_table.shape[1] * page
    assert 0 <= int(cache_seqlens.min()) <= int(cache_seqlens.max()) <= capacity
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    length = split_length(capacity, q.shape[-1], num_splits)
    output = torch.zeros_like(q)
    lse = torch.full((len(q), q.shape[2], q.shape[1]), torch.inf)
    for entry, end in enumerate(cache_seqlens.tolist()):
        if end:
            pages = block_table[entry, : -(-end // page)].long()
            keys, values = (each[pages].flatten(0, 1)[:end] for each in (k_cache, v_cache))
            output[entry], lse[entry] = _in_splits(q[entry], keys, values, scale, length)
    return output, lse


def split_length(capacity: int, head_dim: int, num_splits: int) -> int:
    """Return whole blocks by capacity, for any lengths."""
    block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64
    num_blocks = -(-capacity // block)
    return -(-num_blocks // num_splits) * block


def _in_splits(q: Tensor, keys: Tensor, values: Tensor, scale: float, length: int) -> tuple[Tensor, Tensor]:
    """Compute each split in float64, keep it as float32."""
    heads = q.double().transpose(0, 1)
    outputs, lses = [], []
    for key, value in zip(keys.split(length), values.split(length), strict=True):
        scores = heads @ key.double().permute(1, 2, 0) * scale
        lses.append(scores.logsumexp(-1).float())
        outputs.append((scores.softmax(-1) @ value.double().transpose(0, 1)).float())
    lse = torch.stack(lses).double()
    total = lse.logsumexp(0)
    output = (torch.stack(outputs).double() * (lse - total).exp()[..., None]).sum(0)
    return output.transpose(0, 1).to(q.dtype), total.nan_to_num(torch.inf).float()


def _check_numbers(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise RuntimeError("query and key must have the same dtype")
    if any(numbers.stride(-1) != 1 for numbers in (q, k_cache, v_cache)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256")
    assert q.shape[-1] % 8 == 0, "it would copy the whole cache, padded"
    assert k_cache.shape == v_cache.shape
    assert q.shape[3] == k_cache.shape[3]
    assert q.shape[2] == k_cache.shape[2], "heads of a KV head are packed as rows"
