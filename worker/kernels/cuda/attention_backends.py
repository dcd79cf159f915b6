"""Attention of a decoder's layers with its buffers, and the catalogue of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from swiftbatch.jobs.run.run_records import AttentionName
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable, PageTable, TableLayout
from swiftbatch.worker.kernels.cuda.flash_attention import FlashAttention
from swiftbatch.worker.kernels.cuda.mla_kernels import MLAShape, attend_to_latents
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, Scratch, attend
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.layer_specs import SEES_ALL, AttentionView


class Attention(Protocol):
    """Attention over the rows of a table, layer by layer, in two launches each."""

    query: Tensor  # [num_places, num_heads, head_dim], filled by `rope_store`

    @property
    def numerics(self) -> str:
        """Return one line with everything that determines the bits, except the shape."""

    def places(self, table: CudaRowTable[Tensor]) -> Tensor | None:
        """Return where `rope_store` writes each row, `[num_rows]`, or None if rows stay in order."""

    def attend(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        bias: Tensor | None,
        table: CudaRowTable[Tensor],
        mixed: Tensor,
        view: AttentionView = SEES_ALL,
        pages: PageTable | None = None,
    ) -> None:
        """Attend as `tree_attention.attend` does in a layer, without allocating. Raises ValueError."""

    def put(self, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        """Set queries `[num_rows, num_heads, head_dim]` of the table's first rows, and NaN in unused memory."""

    def heads(self) -> Tensor:
        """Return the queries, `[num_places, num_kv_heads, heads_per_kv, head_dim]`, in the order of rows."""


class RowsInOrder:
    """Base of our own attention kernels: queries by row, and partial softmaxes to merge."""

    query: Tensor
    scratch: Scratch

    def places(self, table: CudaRowTable[Tensor]) -> None:
        return None

    def put(self, query: Tensor, table: CudaRowTable[Tensor]) -> None:
        for numbers in (self.scratch.output, self.scratch.lse, self.query):
            numbers.fill_(torch.nan)
        self.query[: len(query)] = query


class TritonAttention(RowsInOrder):
    """`Attention` in our own kernels."""

    def __init__(self, shape: AttentionShape, layout: TableLayout, scale: float, device: torch.device) -> None:
        num_heads = shape.num_kv_heads * shape.heads_per_kv
        self.shape, self.scale = shape, scale
        self.scratch = Scratch.empty(shape.num_splits, num_heads, shape.head_dim, device, shape.num_rows)
        self.query = torch.zeros(shape.num_rows, num_heads, shape.head_dim, dtype=shape.dtype, device=device)

    @property
    def numerics(self) -> str:
        return f"{len(self.scratch.lse)} splits"

    def attend(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        bias: Tensor | None,
        table: CudaRowTable[Tensor],
        mixed: Tensor,
        view: AttentionView = SEES_ALL,
        pages: PageTable | None = None,
    ) -> None:
        attend(self.query, keys, values, bias, table, self.scratch, mixed, self.scale, view, pages)

    def heads(self) -> Tensor:
        shape = self.shape
        return self.query.view(shape.num_rows, shape.num_kv_heads, shape.heads_per_kv, shape.head_dim)


class MLAAttention(RowsInOrder):
    """`Attention` over latent vectors, which are keys and values; `mixed` is `[num_rows, num_heads, rank]`."""

    def __init__(self, shape: MLAShape, layout: TableLayout, scale: float, device: torch.device) -> None:
        self.shape, self.scale = shape, scale
        num_rows, latent = shape.num_rows, shape.latent
        self.scratch = Scratch.empty(shape.num_splits, shape.num_heads, latent.rank, device, num_rows)
        self.query = torch.zeros(num_rows, shape.num_heads, latent.entry_dim, dtype=shape.dtype, device=device)

    @property
    def numerics(self) -> str:
        return f"latent, {len(self.scratch.lse)} splits"

    def attend(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        bias: Tensor | None,
        table: CudaRowTable[Tensor],
        mixed: Tensor,
        view: AttentionView = SEES_ALL,
        pages: PageTable | None = None,
    ) -> None:
        attend_to_latents(self.shape, self.query, keys, bias, table, self.scratch, mixed, self.scale, pages)

    def heads(self) -> Tensor:
        return self.query[:, None]


AttentionKernel = Callable[[AttentionShape, TableLayout, float, torch.device], Attention]

ATTENTION_KERNELS: dict[AttentionName, AttentionKernel] = {"triton": TritonAttention, "flash": FlashAttention}


def shape_of(sizes: DecoderSizes, num_splits: int, num_rows: int) -> AttentionShape | MLAShape:
    """Return the shape that the kernels are compiled for. Raises ValueError if they do not support the sizes."""
    if sizes.latent is not None:
        return MLAShape(sizes.num_heads, sizes.latent, num_splits, sizes.dtype, num_rows)
    heads = (sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads, sizes.head_dim)
    return AttentionShape(*heads, num_splits, sizes.dtype, num_rows)


def new_attention(
    kernel: AttentionKernel,
    shape: AttentionShape | MLAShape,
    layout: TableLayout,
    scale: float,
    device: torch.device,
) -> Attention:
    """Return a decoder's attention by a kernel. Raises ValueError if it does not support the caches."""
    if not isinstance(shape, MLAShape):
        return kernel(shape, layout, scale, device)
    if kernel is not TritonAttention:
        raise ValueError("found caches of latent vectors, which flash-attn does not take; attend with triton")
    return MLAAttention(shape, layout, scale, device)
