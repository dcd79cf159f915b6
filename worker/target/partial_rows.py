"""Rows of a forward that attend to a partial cache: one call, with the draft tree as a mask. They steer drafts only."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from worker.caches.partial import PartialCache
from worker.target.attention import Asked, attention_by_definition
from worker.tree import ROOT, DraftTree


class PartialRows:
    """The newest token of a chain and a tree below it, behind everything that a partial cache holds."""

    def __init__(self, cache: PartialCache, token_id: int, position: int, tree: DraftTree) -> None:
        """Rows of a token at an absolute position, row 0, and of the tree below it."""
        self.token_ids = [token_id, *tree.token_ids]
        self.positions = [position, *(position + depth for depth in tree.depths())]
        self._cache = cache
        self._mask = _mask(cache, tree) if len(tree) or cache.bias is not None else None  # one row sees everything
        self._group_mask: torch.Tensor | None = None  # the same for every query head of a group

    def __len__(self) -> int:
        return len(self.token_ids)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """Write keys and values behind the cache's entries and attend to all of them that the mask shows."""
        keys, values = self._cache.write(layer, key, value)
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


def _mask(cache: PartialCache, tree: DraftTree) -> torch.Tensor:
    """Additive mask `[num_rows, num_entries + num_rows]`: a node sees those, the root, its ancestors and itself."""
    num_rows = len(tree) + 1
    visible = torch.eye(num_rows, dtype=torch.bool)
    visible[:, 0] = True
    for node, parent in enumerate(tree.parents):
        if parent != ROOT:
            visible[node + 1] |= visible[parent + 1]
    mask = torch.zeros(num_rows, cache.num_entries + num_rows, dtype=cache.shape.dtype, device=cache.shape.device)
    mask[:, cache.num_entries :].masked_fill_(~visible.to(mask.device), float("-inf"))
    if cache.bias is not None:
        mask[:, : len(cache.bias)] = cache.bias
    return mask
