"""The choice of a device's attention kernel: torch's flash attention on CPUs where it runs, else by definition."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from swiftbatch.worker.kernels.sizes import TILE_ROWS

KernelName = Literal["flash attention", "attention by definition"]

PROBED_SIZES = ((1, 128, 64), (1, 128, 512), (1, 128, 4096), (TILE_ROWS, 4, 64))  # batch, query rows, keys
PROBED_HEADS, PROBED_HEAD_DIM = 4, 64


def flash_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's kernel for CPUs, `[batch, heads, rows, head_dim]`: output as `query`, log-sum-exp without the last."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    return output, lse


@functools.cache
def attention_kernel(device_type: str, dtype: torch.dtype) -> KernelName:
    """The kernel for tensors of this kind, found out by calling it once."""
    if device_type != "cpu":
        return "attention by definition"
    try:
        for batch, num_rows, num_keys in PROBED_SIZES:
            query = torch.zeros(batch, PROBED_HEADS, num_rows, PROBED_HEAD_DIM, dtype=dtype)
            keys = torch.zeros(batch, PROBED_HEADS, num_keys, PROBED_HEAD_DIM, dtype=dtype)
            flash_attention(query, keys, keys, 1.0, None)
    except RuntimeError:  # torch packs bf16 keys where there is AMX, and cannot where AVX-512 is switched off
        torch.backends.cuda.enable_flash_sdp(False)  # on CPUs too: drafts leave the choice to torch
        return "attention by definition"
    return "flash attention"


def query_row_quantum(device_type: str, dtype: torch.dtype, group: int) -> int:
    """Multiple of query rows, `group` of them for each row of a tile, at which the kernel treats every one alike."""
    if attention_kernel(device_type, dtype) == "attention by definition":
        return TILE_ROWS * group  # matrix products choose their order by the number of rows
    return 16 if torch.cpu._is_amx_tile_supported() else 4  # the AMX path needs more than AVX-512


def tail_row_quantum(group: int) -> int:
    """Multiple of query rows, `group` of them for each row of a tile, at which a batch's rows are alike on all threads.

    A product of few rows has other bits where its buffer begins elsewhere, as that of another thread may. The numbers
    are measured, and so small that rows which were alike without them keep their bits.
    """
    if torch.get_num_threads() == 1:
        return 1
    return 2 if group <= 2 else 4
