"""Row-exact attention for `transformers` models: shared prefix and gathered tail, merged by log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from worker.tiles import TILE_ROWS, SequenceRows, Tile, tail_mask

ATTENTION_NAME = "swiftbatch_row_exact"


@dataclass(frozen=True)
class AttentionRows:
    """A sequence's rows within a tile, with what every layer needs of them as tensors."""

    rows: SequenceRows
    start: int  # first row in the tile
    tail_slots: torch.Tensor  # [num_rows, BLOCK] int64
    tail_mask: torch.Tensor  # [num_rows, 1, 1, BLOCK]

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


def attention_rows(tile: Tile, dtype: torch.dtype, device: torch.device) -> list[AttentionRows]:
    """Prepare a tile's parts once for all layers."""
    prepared, start = [], 0
    for part in tile.parts:
        slots = torch.from_numpy(part.tail_slots).to(device)
        prepared.append(AttentionRows(part, start, slots, tail_mask(part.tail_lengths, dtype, device)))
        start += len(part)
    return prepared


def row_exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_rows, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tile_rows: list[AttentionRows],
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the rows' keys and values to their caches and attend; returns `[1, num_rows, num_heads, head_dim]`."""
    num_kv_heads = key.shape[1]
    grouped = query[0].unflatten(0, (num_kv_heads, -1)).permute(2, 0, 1, 3)  # [num_rows, kv_heads, group, head_dim]
    output = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])
    for part in tile_rows:
        keys, values = part.rows.cache.layer(int(module.layer_idx))  # type: ignore[arg-type]
        slots = slice(part.rows.first_slot, part.rows.first_slot + len(part.rows))
        keys[:, slots] = key[0, :, part.start : part.end]
        values[:, slots] = value[0, :, part.start : part.end]
        attended = _attend(grouped[part.start : part.end], keys, values, part, scaling)
        output[0, part.start : part.end] = attended.flatten(1, 2)
    return output, None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: AttentionRows, scaling: float
) -> torch.Tensor:
    """Attend `query [num_rows, kv_heads, group, head_dim]` to prefix and tail; same shape out."""
    tail_keys = keys[:, part.tail_slots].transpose(0, 1)  # [num_rows, kv_heads, BLOCK, head_dim]
    tail_values = values[:, part.tail_slots].transpose(0, 1)
    tail, tail_lse = _flash(query, tail_keys, tail_values, scaling, part.tail_mask)
    boundary = part.rows.boundary
    if boundary == 0:
        return tail
    prefix, prefix_lse = _prefix(query, keys[:, :boundary], values[:, :boundary], scaling)
    return _merge(prefix, prefix_lse, tail, tail_lse)


def _prefix(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call over the shared prefix, the query heads of a KV head laid out as rows (and padded to the quantum)."""
    num_rows, _, group, _ = query.shape
    rows = query.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, num_rows * group, head_dim]
    padding = -rows.shape[2] % QUERY_ROW_QUANTUM
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    output, lse = _flash(rows, keys[None], values[None], scaling, None)
    output = output[0, :, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)
    return output, lse[0, :, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its log-sum-exp: output as `query`, lse `[batch, heads, rows] float32`."""
    if query.device.type != "cpu":
        return attention_by_definition(query, keys, values, scaling, mask)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    return output, lse


def attention_by_definition(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as plain matrix products, for devices without a kernel that returns the log-sum-exp."""
    scores = (query @ keys.transpose(-1, -2)).float() * scaling
    scores = scores if mask is None else scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse[..., None]).to(values.dtype) @ values, lse


def _merge(
    first: torch.Tensor, first_lse: torch.Tensor, second: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """Combine two partial attentions `[num_rows, kv_heads, group, head_dim]` of the same queries over disjoint keys."""
    difference = (first_lse - second_lse).contiguous()
    # Padded to whole tiles: an elementwise exponential has other bits in the scalar rest of a loop than in its vectors.
    padded = torch.nn.functional.pad(difference, (0, 0, 0, 0, 0, TILE_ROWS - len(difference)))
    weight = torch.sigmoid(padded)[: len(difference), ..., None]  # the first part's share of the softmax sum
    return (first.float() * weight + second.float() * (1.0 - weight)).to(first.dtype)


def _query_row_quantum() -> int:
    """Multiple of query rows at which the CPU kernel treats every row alike: its AMX path needs more than AVX-512."""
    return 16 if torch.cpu._is_amx_tile_supported() else 4


QUERY_ROW_QUANTUM = _query_row_quantum()

AttentionInterface.register(ATTENTION_NAME, row_exact_attention)
