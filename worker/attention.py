"""Row-exact attention for `transformers` models: shared prefix and gathered tail, merged by log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from worker.attention_kernel import attention_kernel, flash_attention, query_row_quantum
from worker.tiles import TILE_ROWS, SequenceRows, tail_mask

ATTENTION_NAME = "swiftbatch_row_groups"


class RowGroup(Protocol):
    """Rows of one sequence in a forward: they know their own cache."""

    def __len__(self) -> int: ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Keep `key` and `value` `[num_kv_heads, num_rows, head_dim]` and attend to what the rows may see.

        `query` and result `[num_rows, num_kv_heads, group, head_dim]`.
        """


@dataclass(frozen=True)
class ExactRows:
    """Rows that attend to a full cache, with what every layer needs of them as tensors."""

    rows: SequenceRows
    tail_slots: torch.Tensor  # [num_rows, BLOCK] int64
    tail_mask: torch.Tensor  # [num_rows, 1, 1, BLOCK]

    @classmethod
    def prepare(cls, rows: SequenceRows, dtype: torch.dtype, device: torch.device) -> ExactRows:
        return cls(rows, torch.from_numpy(rows.tail_slots).to(device), tail_mask(rows.tail_lengths, dtype, device))

    def __len__(self) -> int:
        return len(self.rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Write keys and values to their slots; attend to the shared prefix and to each row's gathered tail."""
        keys, values = self.rows.cache.write(layer, self.rows.first_slot, key, value)
        return _attend(query, keys, values, self, scaling)


class QueryTap:
    """A group of one row that keeps the queries of every layer on its way."""

    def __init__(self, rows: RowGroup) -> None:
        self._rows = rows
        self._queries: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        self._queries.append(query[0].clone())
        return self._rows.attend(layer, query, key, value, scaling)

    def queries(self) -> torch.Tensor:
        """`[num_layers, num_kv_heads, group, head_dim]`."""
        return torch.stack(self._queries)


def attend_in_groups(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_rows, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    row_groups: list[RowGroup],
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Let every group of rows attend to its own cache; returns `[1, num_rows, num_heads, head_dim]`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    num_kv_heads = key.shape[1]
    grouped = query[0].unflatten(0, (num_kv_heads, -1)).permute(2, 0, 1, 3)  # [num_rows, kv_heads, group, head_dim]
    output = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])  # padding rows stay zero
    start = 0
    for group in row_groups:
        rows = slice(start, start + len(group))
        output[0, rows] = group.attend(layer, grouped[rows], key[0, :, rows], value[0, :, rows], scaling).flatten(1, 2)
        start = rows.stop
    return output, None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: ExactRows, scaling: float
) -> torch.Tensor:
    """Attend `query [num_rows, kv_heads, group, head_dim]` to prefix and tail; same shape out."""
    tail_keys = keys[:, part.tail_slots].transpose(0, 1)  # [num_rows, kv_heads, BLOCK, head_dim]
    tail_values = values[:, part.tail_slots].transpose(0, 1)
    tail, tail_lse = _each_row(query, tail_keys, tail_values, scaling, part.tail_mask)
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
    padding = -rows.shape[2] % query_row_quantum(query.device.type, query.dtype, group)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
    output, lse = _flash(rows, keys[None], values[None], scaling, None)
    output = output[0, :, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)
    return output, lse[0, :, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)


def _each_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row to keys of its own, in a batch of one size where products may choose their order by it."""
    if attention_kernel(query.device.type, query.dtype) == "flash attention":
        return flash_attention(query, keys, values, scaling, mask)
    num_rows, short = len(query), TILE_ROWS - len(query)
    query, keys, values, mask = (
        torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 0, 0, short)) for each in (query, keys, values, mask)
    )
    output, lse = attention_by_definition(query, keys, values, scaling, mask)
    return output[:num_rows], lse[:num_rows]


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its log-sum-exp: output as `query`, lse `[batch, heads, rows] float32`."""
    if attention_kernel(query.device.type, query.dtype) == "flash attention":
        return flash_attention(query, keys, values, scaling, mask)
    return attention_by_definition(query, keys, values, scaling, mask)


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


AttentionInterface.register(ATTENTION_NAME, attend_in_groups)
