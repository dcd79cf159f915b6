"""Attention of a decoder's layers with its buffers: our own kernels, flash-attn, and the catalogue of both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.jobs.run.run_records import AttentionName
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, TableLayout
from swiftbatch.worker.kernels.cuda.kv_kernels import load_rows
from swiftbatch.worker.kernels.cuda.mla_kernels import MLAShape, attend_to_latents
from swiftbatch.worker.kernels.cuda.row_kernels import packed_head
from swiftbatch.worker.kernels.cuda.tree_attention import (
    LOG2_E,
    SCALE_TO_LOG2,
    AttentionShape,
    KeptLayer,
    Scratch,
    attend,
    attend_tail,
    first_of,
    merge_part,
)
from swiftbatch.worker.kernels.cuda.triton_primitives import rounded
from swiftbatch.worker.kernels.cuda.wide_attention import WideShape, attend_wide
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.gpu_kernel_choice import flash_version
from swiftbatch.worker.kernels.kernel_sizes import HEAD_BLOCKS, LATENT_BLOCKS, LayerHeads, num_splits
from swiftbatch.worker.kernels.layer_specs import SEES_ALL


class Attention(Protocol):
    """Attention over the rows of a table, layer by layer, in two launches each."""

    query: Tensor  # [num_places, num_heads, head_dim], filled by `rope_store`

    @property
    def numerics(self) -> str:
        """Return one line with everything that determines the bits, except the shape."""

    def places(self, table: CudaRowTable[Tensor]) -> Tensor | None:
        """Return where `rope_store` writes each row, `[num_rows]`, or None if rows stay in order."""

    def attend(self, layer: int, kept: KeptLayer, table: CudaRowTable[Tensor], mixed: Tensor) -> None:
        """Attend as `tree_attention.attend` does in a layer, without allocating. Raises ValueError."""

    def put(self, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        """Set queries `[num_rows, num_heads, head_dim]` of the table's first rows, and NaN in unused memory."""

    def heads(self) -> Tensor:
        """Return the queries, `[num_places, num_kv_heads, heads_per_kv, head_dim]`, in the order of rows."""


class RowsInOrder:
    """Base of our own attention kernels: queries by row, and partial softmaxes to merge."""

    shape: Any  # has `num_rows`
    query: Tensor
    scratch: Scratch

    def narrowed(self, num_rows: int) -> Self:
        """Return the attention of forwards of fewer rows, in the same memory."""
        other = copy.copy(self)
        other.shape = replace(self.shape, num_rows=num_rows)
        other.scratch, other.query = self.scratch.narrowed(num_rows), self.query[:num_rows]
        return other

    def places(self, table: CudaRowTable[Tensor]) -> None:
        return None

    def put(self, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        for numbers in (self.scratch.output, self.scratch.lse, self.query):
            numbers.fill_(torch.nan)
        self.query[: len(query)] = query


class TritonAttention(RowsInOrder):
    """`Attention` in our own kernels."""

    def __init__(
        self,
        shape: AttentionShape | WideShape,
        layout: TableLayout,
        scale: float,
        device: torch.device,
        memory: RowsInOrder | None = None,
    ) -> None:
        """Share the `memory` of other layers, whose heads are as wide or wider, or allocate."""
        num_rows, num_heads, head_dim = shape.num_rows, shape.num_kv_heads * shape.heads_per_kv, shape.head_dim
        self.shape, self.scale = shape, scale
        if memory is None:
            splits = num_splits(layout.capacity, HEAD_BLOCKS)
            self.scratch = Scratch.empty(splits, num_heads, shape.value_dim, device, num_rows)
            self.query = torch.zeros(num_rows, num_heads, head_dim, dtype=shape.dtype, device=device)
        else:
            self.scratch = memory.scratch.narrowed(num_rows, shape.value_dim)
            self.query = first_of(memory.query, num_rows, num_heads, head_dim)

    @property
    def numerics(self) -> str:
        return f"splits of {HEAD_BLOCKS} blocks"

    def attend(self, layer: int, kept: KeptLayer, table: CudaRowTable[Tensor], mixed: Tensor) -> None:
        attend(self.shape, self.query, kept, table, self.scratch, mixed, self.scale)

    def heads(self) -> Tensor:
        shape = self.shape
        return self.query.view(shape.num_rows, shape.num_kv_heads, shape.heads_per_kv, shape.head_dim)


class WideAttention(TritonAttention):
    """`Attention` of layers whose heads take two heads of a cache."""

    def attend(self, layer: int, kept: KeptLayer, table: CudaRowTable[Tensor], mixed: Tensor) -> None:
        attend_wide(self.shape, self.query, kept, table, self.scratch, mixed, self.scale)


class MLAAttention(RowsInOrder):
    """`Attention` over latent vectors, which are keys and values; `mixed` is `[num_rows, num_heads, rank]`."""

    def __init__(self, shape: MLAShape, layout: TableLayout, scale: float, device: torch.device) -> None:
        self.shape, self.scale = shape, scale
        num_rows, latent = shape.num_rows, shape.latent
        splits = num_splits(latent.most_attended(layout.capacity), LATENT_BLOCKS)
        self.scratch = Scratch.empty(splits, shape.num_heads, latent.rank, device, num_rows)
        self.query = torch.zeros(num_rows, shape.num_heads, latent.key_dim, dtype=shape.dtype, device=device)

    @property
    def numerics(self) -> str:
        of_chosen = "" if self.shape.latent.indexer is None else " of chosen keys"
        return f"latent, splits of {LATENT_BLOCKS} blocks{of_chosen}"

    def attend(self, layer: int, kept: KeptLayer, table: CudaRowTable[Tensor], mixed: Tensor) -> None:
        attend_to_latents(self.shape, self.query, kept, table, self.scratch, mixed, self.scale)

    def heads(self) -> Tensor:
        return self.query[:, None]


# Attention with flash-attn's kernel for prefixes, in two launches per layer. Splits depend on the pages of the longest
# job, so a row's bits depend on its boundary and their number.


@triton.jit
def tail_merge_packed(
    query_ptr, key_ptr, value_ptr, output_ptr, lse_ptr, mixed_ptr, rows_ptr, tail_slots_ptr, packed_ptr,
    scale_log2, stride_slot, stride_head, stride_entry,
    NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS_PER_GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head): the row's tail, merged with flash-attn's output and LSE of its prefix."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(rows_ptr + row * 5).to(tl.int64)
    tail_length = tl.load(rows_ptr + row * 5 + 2)
    if tail_length == 0:
        return

    index = tl.arange(0, TILE_ROWS)
    is_real = index < HEADS_PER_KV
    columns = tl.arange(0, WIDTH)
    packed = packed_head(packed_ptr, row, index, kv_head, NUM_KV_HEADS, HEADS_PER_KV)
    offsets = packed[:, None] * HEAD_DIM + columns[None, :]
    query = load_rows(query_ptr + offsets, is_real, columns, HEAD_DIM, True)
    cache = slot * stride_slot + kv_head.to(tl.int64) * stride_head
    highest, total, acc = attend_tail(
        query, key_ptr + cache, value_ptr + cache, tail_slots_ptr + row * BLOCK, tail_length, columns, columns,
        scale_log2, stride_entry, HEAD_DIM, HEAD_DIM, BLOCK,
    )  # fmt: skip

    group_row = tl.load(packed_ptr + row) % ROWS_PER_GROUP
    group = tl.load(packed_ptr + row) // ROWS_PER_GROUP
    lse_row = (group * NUM_KV_HEADS + kv_head) * ROWS_PER_GROUP + group_row
    lse = tl.load(lse_ptr + lse_row * HEADS_PER_KV + index, mask=is_real, other=0.0) * LOG2_E
    lse = tl.where(lse < float("inf"), lse, float("-inf"))  # inf: the prefix is empty, or has NaN as does `part`
    part = load_rows(output_ptr + offsets, is_real, columns, HEAD_DIM, True).to(tl.float32)
    highest, total, acc = merge_part(part, lse, highest, total, acc)
    places = (row * NUM_KV_HEADS + kv_head) * HEADS_PER_KV + index
    mixed_ptr += places[:, None] * HEAD_DIM + columns[None, :]
    is_place = is_real[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(mixed_ptr, rounded(acc / total[:, None], mixed_ptr.dtype.element_ty), mask=is_place)


class FlashAttention:
    """`Attention` with flash-attn for prefixes; it allocates its own results, in the memory pool of the graph."""

    def __init__(self, shape: AttentionShape, layout: TableLayout, scale: float, device: torch.device) -> None:
        from flash_attn import flash_attn_with_kvcache

        self._call: Any = flash_attn_with_kvcache
        self._shape, self._scale = shape, scale
        assert layout.page is not None, "keys and values lie in pages"
        num_pages = -(-layout.capacity // layout.page)
        self._pages = torch.zeros(layout.num_groups, num_pages, dtype=torch.int32, device=device)
        self._capacity = num_pages * layout.page
        self._num_splits = num_splits(self._capacity, HEAD_BLOCKS)
        self._size = (layout.num_groups, shape.rows_per_group * shape.heads_per_kv, shape.num_kv_heads, shape.head_dim)
        num_places, num_heads = layout.num_groups * shape.rows_per_group, shape.num_kv_heads * shape.heads_per_kv
        size = (num_places, num_heads, shape.head_dim)
        self.query = torch.zeros(size, dtype=shape.dtype, device=device)

    @property
    def numerics(self) -> str:
        return f"flash {flash_version()} prefixes in splits of {self.split_length}"

    @property
    def split_length(self) -> int:
        """Return the positions per split, which depend on the capacity and are therefore part of the numerics."""
        head_dim = self._shape.head_dim
        block = 256 if head_dim <= 64 else 128 if head_dim <= 128 else 64  # flash-attn's block size
        return int(triton.cdiv(triton.cdiv(self._capacity, block), self._num_splits) * block)

    def places(self, table: CudaRowTable[Tensor]) -> Tensor:
        return table.packed

    def attend(self, layer: int, kept: KeptLayer, table: CudaRowTable[Tensor], mixed: Tensor) -> None:
        if kept.bias is not None:
            raise ValueError("found a bias, which flash-attn does not add to scores; attend with triton")
        if kept.view != SEES_ALL:
            raise ValueError("found a window, a soft cap or sinks beside flash-attn; attend with triton")
        if kept.pages is None:
            raise ValueError("found caches without pages, which flash-attn is given; attend with triton")
        slots, boundaries = table.prefixes
        if layer == 0:
            torch.index_select(kept.pages.numbers, 0, slots, out=self._pages)  # of all layers
        output, lse = self._call(
            self.query.view(self._size),
            in_pages(kept.keys, kept.pages.page),
            in_pages(kept.values, kept.pages.page),
            cache_seqlens=boundaries,  # without lengths, flash-attn runs another kernel
            block_table=self._pages,
            softmax_scale=self._scale,
            causal=False,
            num_splits=self._num_splits,  # 0 would let flash-attn choose by the number of groups
            return_softmax_lse=True,
        )
        # `output` is [num_groups, rows_per_group * heads_per_kv, num_kv_heads, head_dim], `lse` float32 [num_groups,
        # num_kv_heads, rows_per_group * heads_per_kv], natural, and inf for an empty prefix
        tail_merge_packed[(len(mixed), self._shape.num_kv_heads)](
            self.query, kept.keys, kept.values, output, lse, mixed, table.rows, table.tail_slots, table.packed,
            self._scale * SCALE_TO_LOG2, *kept.keys.stride()[:3], **packed_constants(self._shape),
        )  # fmt: skip

    def put(self, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        self.query.fill_(torch.nan)
        heads = query.unflatten(1, (-1, self._shape.heads_per_kv)).transpose(1, 2)
        self.query[table.packed[: len(query)].long()] = heads.flatten(1, 2)

    def heads(self) -> Tensor:
        shape = self._shape
        return self.query.view(-1, shape.heads_per_kv, shape.num_kv_heads, shape.head_dim).transpose(1, 2)


def in_pages(kept: Tensor, page: int) -> Tensor:
    """View a pool `[num_slots, num_kv_heads, num_entries, head_dim]` as `[num_pages, page, num_kv_heads, head_dim]`."""
    num_kv_heads, num_entries, head_dim = kept.shape[1:]
    return kept[0].view(num_kv_heads, num_entries // page, page, head_dim).permute(1, 2, 0, 3)


def packed_constants(shape: AttentionShape) -> dict[str, Any]:
    given = shape.tail_constants() | {"ROWS_PER_GROUP": shape.rows_per_group}
    unknown = {"NUM_ROWS", "LEAST_BLOCKS", "VALUE_DIM", "VALUE_WIDTH", "WINDOW", "SOFTCAP_LOG2", "HAS_SINKS"}
    return {name: value for name, value in given.items() if name not in unknown}


# The catalogue of kernels.


AttentionKernel = Callable[[AttentionShape, TableLayout, float, torch.device], Attention]

ATTENTION_KERNELS: dict[AttentionName, AttentionKernel] = {"triton": TritonAttention, "flash": FlashAttention}


def shape_of(sizes: DecoderSizes, num_rows: int) -> AttentionShape | MLAShape:
    """Return the shape that the kernels are compiled for. Raises ValueError if they do not support the sizes."""
    if sizes.latent is not None:
        return MLAShape(sizes.num_heads, sizes.latent, sizes.dtype, num_rows)
    return _shape_of_heads(sizes, LayerHeads(sizes.num_kv_heads, sizes.head_dim), num_rows)


def own_shape_of(sizes: DecoderSizes, heads: LayerHeads, num_rows: int) -> AttentionShape | WideShape:
    """Return the shape of layers with heads of their own. Raises ValueError if the kernels do not support it."""
    if fault := heads.gpu_fault(sizes.head_dim):
        raise ValueError(fault)
    if heads.head_dim == sizes.head_dim:
        return _shape_of_heads(sizes, heads, num_rows)
    if sizes.score_softcap or sizes.value_dim:
        raise ValueError("found a soft cap of scores or narrow values beside wide heads")
    counts = (heads.num_kv_heads, sizes.num_heads // heads.num_kv_heads, heads.head_dim)
    return WideShape(*counts, sizes.dtype, num_rows)


def _shape_of_heads(sizes: DecoderSizes, heads: LayerHeads, num_rows: int) -> AttentionShape:
    counts = (heads.num_kv_heads, sizes.num_heads // heads.num_kv_heads, heads.head_dim)
    return AttentionShape(*counts, sizes.dtype, num_rows, sizes.value_dim)


def own_attention(
    shape: AttentionShape | WideShape, layout: TableLayout, scale: float, device: torch.device
) -> TritonAttention:
    """Return the attention of layers with heads of their own."""
    return (WideAttention if isinstance(shape, WideShape) else TritonAttention)(shape, layout, scale, device)


def new_attention(
    kernel: AttentionKernel,
    shape: AttentionShape | MLAShape,
    layout: TableLayout,
    scale: float,
    device: torch.device,
    own: TritonAttention | None = None,
) -> Attention:
    """Return a decoder's attention by a kernel, beside that of layers with heads of their own.

    Raises ValueError if it does not support the caches.
    """
    if own is not None:
        if kernel is not TritonAttention or isinstance(shape, MLAShape):
            raise ValueError("found heads of two forms, which flash-attn does not take; attend with triton")
        return TritonAttention(shape, layout, scale, device, own)
    if not isinstance(shape, MLAShape):
        if shape.narrow_values and kernel is not TritonAttention:
            raise ValueError("found values narrower than keys, which flash-attn does not take; attend with triton")
        return kernel(shape, layout, scale, device)
    if kernel is not TritonAttention:
        raise ValueError("found caches of latent vectors, which flash-attn does not take; attend with triton")
    return MLAAttention(shape, layout, scale, device)
