"""Attention of draft-tree rows over long caches: two launches a layer for all sequences, each row's bits its own.

A row sees the prefix of its sequence, positions below its boundary, and a tail: the keys from there on, gathered in
position order. `prefix_split` cuts a prefix into splits by its own length alone; `tail_merge` attends to the tail and
folds the splits in, in order. Rows of a tile never meet: every reduction runs along keys or a head's dimensions.
With a window, a prefix begins at the first block that a row at its boundary sees; `prefix.py` and `tail.py` leave out
the keys that a row does not see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from swiftbatch.worker.kernels.cuda.cuda_row_table import BLOCK, CudaRowTable, PageTable
from swiftbatch.worker.kernels.cuda.prefix import prefix_split
from swiftbatch.worker.kernels.cuda.tail import tail_merge
from swiftbatch.worker.kernels.forms import SEES_ALL, AttentionView
from swiftbatch.worker.kernels.sizes import NUM_ROWS, least_blocks

LOG2_E = math.log2(math.e)
TAIL_TILE_ROWS = 16  # query heads of a KV head, at most; tensor cores take no fewer
WIDEST_FOR_FOUR_WARPS = 128  # a head's width whose accumulators fit their registers


@dataclass(frozen=True)
class Scratch:
    """Partial results of one layer's prefixes; one for all layers, since they run one after the other."""

    output: Tensor  # [num_splits, num_rows, num_heads, head_dim] float32
    lse: Tensor  # [num_splits, num_rows, num_heads] float32, base 2

    @classmethod
    def empty(
        cls, num_splits: int, num_heads: int, head_dim: int, device: torch.device, num_rows: int = NUM_ROWS
    ) -> Scratch:
        size = (num_splits, num_rows, num_heads)
        return cls(torch.empty(*size, head_dim, device=device), torch.empty(size, device=device))


@dataclass(frozen=True)
class AttentionShape:
    """The sizes that a run's attention kernels are compiled for."""

    num_kv_heads: int
    heads_per_kv: int  # 1 to 16
    head_dim: int
    num_splits: int  # that a prefix is cut into
    dtype: torch.dtype
    num_rows: int = NUM_ROWS  # of a forward

    def __post_init__(self) -> None:
        """Raises ValueError for more query heads than `tail_merge` has rows for."""
        if self.heads_per_kv > TAIL_TILE_ROWS:
            raise ValueError(f"found {self.heads_per_kv} query heads a KV head, expected at most {TAIL_TILE_ROWS}")

    @property
    def tile_rows(self) -> int:
        """Rows times query heads of a KV head; below 64, sm_90 has no wgmma. Float32 is no matter for tensor cores."""
        return 64 if self.dtype == torch.bfloat16 else 16

    @property
    def rows_per_group(self) -> int:
        """Rows of a sequence whose heads fill one tile, so that a key is read once for all of them."""
        return self.tile_rows // self.heads_per_kv

    def prefix_constants(self, view: AttentionView = SEES_ALL) -> dict[str, Any]:
        """Return the constants of `prefix_split`, with its warps and stages."""
        bf16_warps = 4 if self.head_dim <= WIDEST_FOR_FOUR_WARPS else 8
        return {
            **self._sizes(),
            **_seen(view),
            "TILE_ROWS": self.tile_rows,
            "HALF": triton.next_power_of_2(self.head_dim) // 2,
            "num_warps": bf16_warps if self.dtype == torch.bfloat16 else 16,
            "num_stages": 2,
        }

    def tail_constants(self, view: AttentionView = SEES_ALL) -> dict[str, Any]:
        """Return the constants of `tail_merge`, with its warps and stages."""
        return {
            **self._sizes(),
            **_seen(view),
            "HAS_SINKS": view.sinks is not None,
            "TILE_ROWS": TAIL_TILE_ROWS,
            "WIDTH": triton.next_power_of_2(self.head_dim),
            "num_warps": 4 if self.dtype == torch.bfloat16 else 8,
            "num_stages": 1,
        }

    def _sizes(self) -> dict[str, int]:
        return {
            "NUM_ROWS": self.num_rows,
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEADS_PER_KV": self.heads_per_kv,
            "HEAD_DIM": self.head_dim,
            "NUM_SPLITS": self.num_splits,
            "LEAST_BLOCKS": least_blocks(self.num_rows),
            "BLOCK": BLOCK,
        }


def _seen(view: AttentionView) -> dict[str, Any]:
    return {"WINDOW": view.window or 0, "SOFTCAP_LOG2": (view.softcap or 0.0) * LOG2_E}


def attend(
    query: Tensor,  # [num_rows, num_heads, head_dim], side by side
    keys: Tensor,  # [num_slots, num_kv_heads, capacity, row_width], one layer of the arena
    values: Tensor,  # as keys, with the same strides
    bias: Tensor | None,  # [num_slots, capacity] float32, added to scores of the prefix; -inf leaves an entry out
    table: CudaRowTable[Tensor],
    scratch: Scratch,
    mixed: Tensor,  # as query
    scale: float,
    view: AttentionView = SEES_ALL,  # its sinks in float32, on the device
    pages: PageTable | None = None,  # where prefixes lie; None: every slot's entries side by side
) -> None:
    """Mix each row's heads from what it may see. Padding rows stay as they are. Nothing is allocated."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, num_splits = keys.shape[1], len(scratch.lse)
    shape = AttentionShape(num_kv_heads, num_heads // num_kv_heads, head_dim, num_splits, query.dtype, num_rows)
    scale_log2 = scale * LOG2_E
    strides = keys.stride()[:3]
    prefix_split[(len(table.groups) * num_kv_heads, num_splits)](
        query, keys, values, bias, None if pages is None else pages.numbers, scratch.output, scratch.lse,
        table.groups, table.rows, scale_log2, *strides, 0 if bias is None else bias.stride(0),
        0 if pages is None else pages.numbers.stride(0),
        HAS_BIAS=bias is not None, PAGE=0 if pages is None else pages.page, **shape.prefix_constants(view),
    )  # fmt: skip
    tail_merge[(num_rows, num_kv_heads)](
        query, keys, values, scratch.output, scratch.lse, mixed, table.rows, table.tail_slots, view.sinks,
        scale_log2, *strides, **shape.tail_constants(view),
    )  # fmt: skip
