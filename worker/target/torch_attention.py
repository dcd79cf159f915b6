"""Torch's attention kernels: the choice of a device's, and the masks of what rows see under one span.

The block of positions alone decides where the prefix begins and whether it takes a mask. So a row meets the same calls
whichever rows share its forward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.nn.functional import pad

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, TILE_ROWS
from swiftbatch.worker.model.attention_masks import Span
from swiftbatch.worker.target.tiles import SequenceRows, tail_mask


@dataclass(frozen=True)
class Seen:
    """The shared prefix is the positions from `start` to the group's boundary; the tail is gathered for each row."""

    start: int
    tail_mask: torch.Tensor  # [num_rows, 1, 1, BLOCK]
    prefix_mask: torch.Tensor | None = None  # [num_rows, boundary - start], where some row of the block sees less
    is_blind: torch.Tensor | None = None  # [num_rows, 1, 1] with a mask: rows that see nothing of the prefix
    _laid_out: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def prefix_rows(self, group: int, padding: int) -> torch.Tensor | None:
        """The prefix mask for the query heads of a KV head as rows, `[1, 1, num_rows * group + padding, -]`."""
        if self.prefix_mask is None:
            return None
        if (group, padding) not in self._laid_out:
            rows = self.prefix_mask.repeat_interleave(group, dim=0)
            self._laid_out[group, padding] = pad(rows, (0, 0, 0, padding))[None, None]
        return self._laid_out[group, padding]

    def prefix_of_each(self) -> Iterable[torch.Tensor | None]:
        """The prefix mask of every row, `[boundary - start]`."""
        return [None] * len(self.tail_mask) if self.prefix_mask is None else self.prefix_mask

    def without_blind(self, output: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The prefix's attention `[num_rows, ...]`, in which rows that see nothing of it have no weight."""
        if self.is_blind is None:
            return output, lse
        return output.masked_fill(self.is_blind[..., None], 0.0), lse.masked_fill(self.is_blind, float("-inf"))


def see(rows: SequenceRows, span: Span, dtype: torch.dtype, device: torch.device) -> Seen:
    """Return what rows see in layers of this span."""
    boundary = rows.boundary
    firsts = torch.tensor([span.first(boundary + length - 1) for length in rows.tail_lengths])  # [num_rows]
    tail = tail_mask(rows.tail_lengths, (firsts - boundary).tolist(), dtype, device)
    start = min(boundary, span.first(boundary) // BLOCK * BLOCK)
    if start == boundary or span.first(boundary + BLOCK - 1) <= start:
        return Seen(start, tail)
    is_hidden = torch.arange(start, boundary) < firsts[:, None]
    mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
    return Seen(start, tail, mask.to(device), (firsts >= boundary)[:, None, None].to(device))


KernelName = Literal["flash attention", "attention by definition"]

PROBED_SIZES = ((1, 128, 64), (1, 128, 512), (1, 128, 4096), (TILE_ROWS, 4, 64))  # batch, query rows, keys
PROBED_HEADS, PROBED_HEAD_DIM = 4, 64


def flash_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's kernel for CPUs, `[batch, heads, rows, head_dim]`: output as `query`, log-sum-exp without the last.

    Torch shares out products of one head alone among threads, with other bits, and leaves each of several to one
    thread: so one head comes twice.
    """
    batch, heads, *_ = query.shape
    if batch * heads == 1 and torch.get_num_threads() > 1:
        query, keys, values = (each.expand(2, -1, -1, -1) for each in (query, keys, values))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    return output[:batch], lse[:batch]


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
    has_amx = device_type == "cpu" and torch.cpu._is_amx_tile_supported()
    packs_keys = (
        has_amx and dtype == torch.bfloat16
    )  # where rows are many beside keys: their logarithms have other bits
    if packs_keys or attention_kernel(device_type, dtype) == "attention by definition":
        return TILE_ROWS * group  # matrix products choose their order by the number of rows
    return 16 if has_amx else 4  # the AMX path needs more than AVX-512


def tail_row_quantum(group: int) -> int:
    """Multiple of query rows, `group` of them for each row of a tile, at which a batch's rows are alike on all threads.

    A product of few rows has other bits where its buffer begins elsewhere, as that of another thread may. The numbers
    are measured, and so small that rows which were alike without them keep their bits.
    """
    if torch.get_num_threads() == 1:
        return 1
    return 2 if group <= 2 else 4
