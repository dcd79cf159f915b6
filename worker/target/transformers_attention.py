"""Row-exact attention for `transformers` models: shared prefix and gathered tail, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.model.attention_masks import FULL, Span
from swiftbatch.worker.target.tiles import SequenceRows
from swiftbatch.worker.target.torch_attention import (
    Seen,
    attention_kernel,
    flash_attention,
    query_row_quantum,
    see,
    tail_row_quantum,
)

ATTENTION_NAME = "swiftbatch_row_groups"


@dataclass(frozen=True)
class Asked:
    """The demands of a layer on its attention, beside queries, keys and values."""

    scaling: float
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) (Gemma 2)
    sinks: torch.Tensor | None = None  # [num_kv_heads, group] scores that take their share and give nothing (GPT-OSS)


class RowGroup(Protocol):
    """Rows of one sequence in a forward: they know their own cache."""

    def __len__(self) -> int: ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """Keep `key` and `value` `[num_kv_heads, num_rows, head_dim]` and attend to what the rows may see.

        `query` and result `[num_rows, num_kv_heads, group, head_dim]`.
        """


@dataclass(frozen=True)
class ExactRows:
    """Rows that attend to a full cache, with what every layer needs of them as tensors."""

    rows: SequenceRows
    tail_entries: torch.Tensor  # [num_rows, BLOCK] int64
    spans: Sequence[Span]  # of every layer
    attends: Sequence[Attend]  # of every layer
    seen: dict[Span, Seen]  # for layers that attend in torch

    @classmethod
    def prepare(
        cls,
        rows: SequenceRows,
        dtype: torch.dtype,
        device: torch.device,
        spans: Sequence[Span] = (FULL,),
        attends: Sequence[Attend] | None = None,
    ) -> ExactRows:
        """Prepare rows for layers of these spans, all of which attend in torch where nothing else is said."""
        attends = [attend_in_torch] * len(spans) if attends is None else attends
        needed = {span for span, attend in zip(spans, attends, strict=True) if attend is attend_in_torch}
        seen = {span: see(rows, span, dtype, device) for span in needed}
        return cls(rows, torch.from_numpy(rows.tail_entries).to(device), spans, attends, seen)

    def __len__(self) -> int:
        return len(self.rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """Write keys and values to their entries; attend to the shared prefix and to each row's own tail."""
        return self.attends[layer](self, layer, query, key, value, asked)


Attend = Callable[[ExactRows, int, torch.Tensor, torch.Tensor, torch.Tensor, Asked], torch.Tensor]
"""`ExactRows.attend` of one layer: whoever multiplies."""


def attend_in_torch(
    rows: ExactRows, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
) -> torch.Tensor:
    """An `Attend` for any layer: a kernel of torch over the prefix, and one over the gathered tails."""
    cache = rows.rows.cache
    kept = cache.write(layer, rows.rows.first_entry, key, value)
    keys, values = (cache.shape.numbers(each) for each in kept)
    return _attend(query, keys, values, rows, rows.seen[rows.spans[layer]], asked)


class QueryTap:
    """A group of one row that keeps the queries of every layer on its way."""

    def __init__(self, rows: RowGroup) -> None:
        self._rows = rows
        self._queries: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        self._queries.append(query[0].clone())
        return self._rows.attend(layer, query, key, value, asked)

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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # `layer_needs` has refused models that ask for what matters and is not known here
) -> tuple[torch.Tensor, None]:
    """Let every group of rows attend to its own cache; returns `[1, num_rows, num_heads, head_dim of values]`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    num_kv_heads, value_dim = key.shape[1], value.shape[3]
    head_dim = max(key.shape[3], value_dim)
    if key.shape[3] != value_dim:  # one cache holds both
        query, key, value = (pad(each, (0, head_dim - each.shape[3])) for each in (query, key, value))
    sinks = None if s_aux is None else s_aux.float().view(num_kv_heads, -1)
    asked = Asked(scaling, softcap, sinks)
    grouped = query[0].unflatten(0, (num_kv_heads, -1)).permute(2, 0, 1, 3)  # [num_rows, kv_heads, group, head_dim]
    output = query.new_zeros(1, query.shape[2], query.shape[1], head_dim)  # padding rows stay zero
    start = 0
    for group in row_groups:
        rows = slice(start, start + len(group))
        output[0, rows] = group.attend(layer, grouped[rows], key[0, :, rows], value[0, :, rows], asked).flatten(1, 2)
        start = rows.stop
    return output[..., :value_dim], None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: ExactRows, seen: Seen, asked: Asked
) -> torch.Tensor:
    """Attend `query [num_rows, kv_heads, group, head_dim]` to prefix and tail; same shape out."""
    output, lse = _tail(query, keys, values, part.tail_entries, seen, asked)
    if seen.start < part.rows.boundary:
        shared = slice(seen.start, part.rows.boundary)
        prefix, prefix_lse = seen.without_blind(*_prefix(query, keys[:, shared], values[:, shared], seen, asked))
        share = _on_whole_tiles(_share, prefix_lse, lse)[..., None]
        output = (prefix.float() * share + output.float() * (1.0 - share)).to(output.dtype)
        lse = lse if asked.sinks is None else _on_whole_tiles(torch.logaddexp, prefix_lse, lse)
    if asked.sinks is not None:
        share = _on_whole_tiles(_share, lse, asked.sinks.expand_as(lse))[..., None]
        output = (output.float() * share).to(output.dtype)
    return output


def _tail(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, entries: torch.Tensor, seen: Seen, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each row to its own gathered keys: output as `query`, lse `[num_rows, kv_heads, group]`."""
    tail_keys = keys[:, entries].transpose(0, 1)  # [num_rows, kv_heads, BLOCK, head_dim]
    tail_values = values[:, entries].transpose(0, 1)
    if asked.softcap is None:
        return _each_row(query, tail_keys, tail_values, asked.scaling, seen.tail_mask)
    return _row_by_row(query, tail_keys, tail_values, asked, seen.tail_mask)


def _prefix(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Seen, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the shared prefix, as `_tail`: one call, the query heads of a KV head laid out as rows."""
    num_rows, _, group, _ = query.shape
    if asked.softcap is not None:
        keys, values = (each.expand(num_rows, *each.shape) for each in (keys, values))
        return _row_by_row(query, keys, values, asked, seen.prefix_of_each())
    rows = query.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, num_rows * group, head_dim]
    padding = -rows.shape[2] % query_row_quantum(query.device.type, query.dtype, group)
    rows = pad(rows, (0, 0, 0, padding))
    output, lse = _flash(rows, keys[None], values[None], asked.scaling, seen.prefix_rows(group, padding))
    output = output[0, :, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)
    return output, lse[0, :, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)


def _row_by_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    asked: Asked,
    masks: Iterable[torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend where no kernel can: every row is a call of its own, the very one that plain decoding makes."""
    parts = [
        attention_by_definition(row, its_keys, its_values, asked.scaling, mask, asked.softcap)
        for row, its_keys, its_values, mask in zip(query, keys, values, masks, strict=True)
    ]
    output, lse = (torch.stack(part) for part in zip(*parts, strict=True))
    return output, lse


def _each_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row to keys of its own, in a batch of one size where products may choose their order by it."""
    if attention_kernel(query.device.type, query.dtype) == "flash attention":
        group = query.shape[2]
        query = pad(query, (0, 0, 0, -group % tail_row_quantum(group)))
        output, lse = flash_attention(query, keys, values, scaling, mask)
        return output[:, :, :group], lse[:, :, :group]
    num_rows, short = len(query), TILE_ROWS - len(query)
    query, keys, values, mask = (pad(each, (0, 0, 0, 0, 0, 0, 0, short)) for each in (query, keys, values, mask))
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
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as plain matrix products, for devices without a kernel that returns the log-sum-exp, and soft caps."""
    scores = (query @ keys.transpose(-1, -2)).float() * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if mask is None else scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse[..., None]).to(values.dtype) @ values, lse


def _share(first_lse: torch.Tensor, second_lse: torch.Tensor) -> torch.Tensor:
    """The first part's share of the sum of two softmax sums."""
    return torch.sigmoid(first_lse - second_lse)


def _on_whole_tiles(function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    """An elementwise function of tensors `[num_rows, ...]`, taken over `TILE_ROWS` rows.

    An elementwise exponential has other bits in the scalar rest of a loop than in its vectors.
    """
    num_rows = len(rows[0])
    padded = [pad(each, (0, 0) * (each.ndim - 1) + (0, TILE_ROWS - num_rows)).contiguous() for each in rows]
    return function(*padded)[:num_rows]


AttentionInterface.register(ATTENTION_NAME, attend_in_groups)
