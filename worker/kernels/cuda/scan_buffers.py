"""Static buffers of the scan for CUDA graphs; programs find their rows and chunks on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS, least_blocks
from swiftbatch.worker.kernels.scan_coding import CLUSTER_CHUNKS, SCAN_CHUNK

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape

TILE_ROWS = 16  # a tile has one list of keys; tensor cores support no fewer rows
MOST_SAMPLED = 128  # number of sampled blocks that determine a threshold
SAMPLED_PER_PROGRAM = 8
CLUSTER_COLUMNS = 32  # number of columns of a cluster's matrix that a program reads at a time


@dataclass(frozen=True)
class TextSizes:
    """Limits of the scanned texts of one model."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    head_dim: int
    most_chunks: int  # at least 1
    num_best: int  # approximate number of keys that a query reads exactly
    first: int  # position of the first scanned key

    @property
    def most_clusters(self) -> int:
        return -(-self.most_chunks // CLUSTER_CHUNKS)


@dataclass(frozen=True)
class ScannedTexts:
    """Coded chunks of every layer and slot, and addresses of the slots' keys."""

    sizes: TextSizes
    codes: Tensor  # [num_layers, num_slots, num_kv_heads, most_chunks * SCAN_CHUNK * head_dim / 4] uint8
    means: Tensor  # [num_layers, num_slots, num_kv_heads, most_chunks, head_dim] float32
    spreads: Tensor  # [num_layers, num_slots, num_kv_heads, head_dim] float32
    moments: Tensor  # [num_layers, num_slots, num_kv_heads, most_clusters, 2 * head_dim * (head_dim + 1)] float32
    addresses: Tensor  # [num_layers, num_slots] int64: addresses of the full cache's keys, on the device or the host
    full_slots: Tensor  # [num_slots] int32: slots of the full caches, to find their pages
    num_chunks: Tensor  # [num_slots] int32
    flat_deviations: Tensor  # [num_slots] float32: deviation of scores below which no key is worth reading

    @classmethod
    def empty(cls, sizes: TextSizes, device: torch.device) -> ScannedTexts:
        heads, head_dim = (sizes.num_layers, sizes.num_slots, sizes.num_kv_heads), sizes.head_dim
        num_bytes = sizes.most_chunks * SCAN_CHUNK * head_dim // 4
        return cls(
            sizes,
            torch.empty(*heads, num_bytes, dtype=torch.uint8, device=device),
            torch.empty(*heads, sizes.most_chunks, head_dim, device=device),
            torch.empty(*heads, head_dim, device=device),
            torch.empty(*heads, sizes.most_clusters, 2 * head_dim * (head_dim + 1), device=device),
            torch.zeros(sizes.num_layers, sizes.num_slots, dtype=torch.int64, device=device),
            torch.zeros(sizes.num_slots, dtype=torch.int32, device=device),
            torch.zeros(sizes.num_slots, dtype=torch.int32, device=device),
            torch.zeros(sizes.num_slots, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.codes, self.means, self.spreads, self.moments, self.addresses, self.full_slots, self.num_chunks,
            self.flat_deviations,
        )  # fmt: skip


@dataclass(frozen=True)
class ScanScratch:
    """Buffers between the launches of a layer, shared by all layers."""

    stats: Tensor  # [num_rows, num_heads, most_clusters, 2] float32: mean and deviation of scores
    gains: Tensor  # [most_clusters, num_rows, num_heads, head_dim] float32
    samples: Tensor  # [num_rows, num_heads, MOST_SAMPLED * BLOCK] float32
    limits: Tensor  # [num_rows, num_heads] float32: lowest scores of keys to read
    entries: Tensor  # [num_rows, num_kv_heads, most_chunks, SCAN_CHUNK] int32: keys, at a tile's first row
    counts: Tensor  # [num_rows, num_kv_heads, most_chunks] int32
    output: Tensor  # [num_splits, num_rows, num_heads, head_dim] float32
    lse: Tensor  # [num_splits, num_rows, num_heads] float32, base 2

    @classmethod
    def empty(
        cls, sizes: TextSizes, num_heads: int, num_splits: int, device: torch.device, num_rows: int = NUM_ROWS
    ) -> ScanScratch:
        rows, lists = (num_rows, num_heads), (num_rows, sizes.num_kv_heads, sizes.most_chunks)
        return cls(
            torch.empty(*rows, sizes.most_clusters, 2, device=device),
            torch.empty(sizes.most_clusters, *rows, sizes.head_dim, device=device),
            torch.empty(*rows, MOST_SAMPLED * BLOCK, device=device),
            torch.empty(rows, device=device),
            torch.empty(*lists, SCAN_CHUNK, dtype=torch.int32, device=device),
            torch.empty(lists, dtype=torch.int32, device=device),
            torch.empty(num_splits, *rows, sizes.head_dim, device=device),
            torch.empty(num_splits, *rows, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return (
            self.stats, self.gains, self.samples, self.limits, self.entries, self.counts, self.output, self.lse,
        )  # fmt: skip


def scan_constants(shape: AttentionShape, sizes: TextSizes) -> dict[str, dict[str, int]]:
    """Return constants, warps and stages of each scan kernel by name."""
    width = triton.next_power_of_2(shape.head_dim)
    known = {
        "NUM_ROWS": shape.num_rows,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEADS_PER_KV": shape.heads_per_kv,
        "NUM_HEADS": shape.num_kv_heads * shape.heads_per_kv,
        "HEAD_DIM": shape.head_dim,
        "NUM_SPLITS": shape.num_splits,
        "LEAST_BLOCKS": least_blocks(shape.num_rows),
        "TILE_ROWS": TILE_ROWS,
        "WIDTH": width,
        "QUARTER": max(16, width // 4),
        "COLUMNS": CLUSTER_COLUMNS,
        "BLOCK": BLOCK,
        "CHUNK": SCAN_CHUNK,
        "CLUSTER_CHUNKS": CLUSTER_CHUNKS,
        "MOST_CHUNKS": sizes.most_chunks,
        "MOST_CLUSTERS": sizes.most_clusters,
        "CLUSTERS_WIDTH": max(2, triton.next_power_of_2(sizes.most_clusters)),
        "MOST_SAMPLED": MOST_SAMPLED,
        "PER_PROGRAM": SAMPLED_PER_PROGRAM,
    }
    heads = ("NUM_KV_HEADS", "HEADS_PER_KV", "HEAD_DIM", "TILE_ROWS", "WIDTH")
    chunks = ("BLOCK", "CHUNK", "MOST_CHUNKS")
    clouds = ("CLUSTER_CHUNKS", "MOST_CLUSTERS")
    names = {
        "attend_to_clusters": (*heads, *clouds, "NUM_ROWS", "COLUMNS"),
        "sample_scores": (*heads, *chunks, "QUARTER", "MOST_SAMPLED", "PER_PROGRAM"),
        "find_threshold": (*clouds, "NUM_HEADS", "BLOCK", "CHUNK", "MOST_SAMPLED", "CLUSTERS_WIDTH"),
        "choose_keys": (*heads, *chunks, "QUARTER", "NUM_SPLITS"),
        "attend_best": (*heads, *chunks, "NUM_SPLITS", "NUM_ROWS"),
        "scan_merge": (*heads, *clouds, "BLOCK", "CHUNK", "NUM_SPLITS", "LEAST_BLOCKS", "NUM_ROWS"),
    }
    wide = {"find_threshold", "choose_keys", "scan_merge"} if shape.dtype == torch.bfloat16 else names
    return {
        kernel: {name: known[name] for name in own}
        | {"num_warps": 8 if kernel in wide else 4, "num_stages": 3 if kernel == "attend_best" else 2}
        for kernel, own in names.items()
    }


@triton.jit
def group_of(groups_ptr, num_chunks_ptr, NUM_KV_HEADS: tl.constexpr):
    """Return the slot, KV head, first row, end row and number of chunks (0: padding) by the first program index."""
    group_ptr = groups_ptr + tl.program_id(0) // NUM_KV_HEADS * 4
    slot = tl.load(group_ptr).to(tl.int64)
    first_row = tl.load(group_ptr + 1)
    num_rows = tl.load(group_ptr + 2)
    num_chunks = tl.where(num_rows > 0, tl.load(num_chunks_ptr + slot), 0)
    return slot, tl.program_id(0) % NUM_KV_HEADS, first_row, first_row + num_rows, num_chunks


@triton.jit
def tile_of(
    row, end, kv_head, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, TILE_ROWS: tl.constexpr
):  # fmt: skip
    """Return the indices (row, then head) of the queries in the tile that starts at `row`.

    The second result is a mask that is False for padding.
    """
    index = tl.arange(0, TILE_ROWS)
    in_rows = row + index // HEADS_PER_KV
    is_real = (index < TILE_ROWS // HEADS_PER_KV * HEADS_PER_KV) & (in_rows < end)
    return in_rows * (NUM_KV_HEADS * HEADS_PER_KV) + kv_head * HEADS_PER_KV + index % HEADS_PER_KV, is_real
