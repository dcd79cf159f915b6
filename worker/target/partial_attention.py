"""Attention of rows to a partial cache in torch: one call, with the draft tree as a mask."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from swiftbatch.worker.target.attention import Asked, attention_by_definition
from swiftbatch.worker.target.partial_rows import PartialRows


class PartialAttention:
    """A `RowGroup` of rows behind a partial cache."""

    def __init__(self, rows: PartialRows) -> None:
        self._rows = rows
        sees_everything = len(rows) == 1 and rows.cache.bias is None
        self._mask = None if sees_everything else _mask(rows)
        self._group_mask: torch.Tensor | None = None  # the same for every query head of a group

    def __len__(self) -> int:
        return len(self._rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """Write keys and values behind the cache's entries and attend to all of them that the mask shows."""
        keys, values = self._rows.cache.write(layer, self._rows.first_entry, key, value)
        num_rows, _, group, _ = query.shape
        if self._mask is not None and self._group_mask is None:
            self._group_mask = self._mask.repeat_interleave(group, dim=0)
        rows = query.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, num_rows * group, head_dim]
        output = _attend(rows, keys[None], values[None], self._group_mask, asked)
        attended: torch.Tensor = output[0].unflatten(1, (num_rows, group)).transpose(0, 1)
        return attended


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, asked: Asked
) -> torch.Tensor:
    """Attention of rows `[1, num_kv_heads, num_rows * group, head_dim]` to all entries, as it is asked for."""
    if asked.softcap is None and asked.sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=asked.scaling)
    output, lse = attention_by_definition(query, keys, values, asked.scaling, mask, asked.softcap)
    if asked.sinks is None:
        return output
    group = asked.sinks.shape[1]
    share = torch.sigmoid(lse.unflatten(2, (-1, group)) - asked.sinks[:, None]).flatten(2)
    return output * share[..., None].to(output.dtype)


def _mask(rows: PartialRows) -> torch.Tensor:
    """Additive mask `[num_rows, num_entries + num_rows]`: biases of entries, then 0 where a row's tail says so."""
    shape, first = rows.cache.shape, rows.first_entry
    mask = np.full((len(rows), first + len(rows)), -np.inf, dtype=np.float32)
    mask[:, :first] = 0.0 if rows.biases is None else rows.biases[:first]
    for row, length in enumerate(rows.tail_lengths):
        mask[row, rows.tail_entries[row, :length]] = 0.0
    return torch.from_numpy(mask).to(shape.device, shape.dtype)
